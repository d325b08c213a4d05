"""The reference GPT, real text, and the ladder that measures each technique on them.

From the bottom up: ``gpt``, ``text``, ``ladder``.
"""

from lightning_fasttrain.bench.gpt import GPT, SIZES, Block, GPTConfig, GPTModule, Size
from lightning_fasttrain.bench.ladder.preflight import Ladder, prepare
from lightning_fasttrain.bench.ladder.run_ladder import climb
from lightning_fasttrain.bench.ladder.rungs import NAIVE, Rung, rungs
from lightning_fasttrain.bench.text import batches, encode_text, read_text

__all__ = [
    "GPT",
    "NAIVE",
    "SIZES",
    "Block",
    "GPTConfig",
    "GPTModule",
    "Ladder",
    "Rung",
    "Size",
    "batches",
    "climb",
    "encode_text",
    "prepare",
    "read_text",
    "rungs",
]
