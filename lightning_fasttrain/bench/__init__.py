"""The reference model, real text, and what a machine offers.

``ladder`` measures each technique on it.

From the bottom up: ``gpt``, ``machine``, ``text``, ``doctor``, ``sizes``, ``ladder``, ``zoo``, ``techniques``.
"""

from lightning_fasttrain.bench.gpt import GPT, Block, GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.climb import climb
from lightning_fasttrain.bench.ladder.preparation import Ladder, prepare
from lightning_fasttrain.bench.ladder.rungs import NAIVE, Rung, rungs
from lightning_fasttrain.bench.sizes import SIZES, Size
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
