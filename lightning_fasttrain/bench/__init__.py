"""The reference model, real text, and the ladder that measures each technique on this machine."""

from lightning_fasttrain.bench.gpt import GPT, Block, GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder import climb
from lightning_fasttrain.bench.preparation import Ladder, prepare
from lightning_fasttrain.bench.rungs import NAIVE, Rung, rungs
from lightning_fasttrain.bench.sizes import SIZES, Size
from lightning_fasttrain.bench.text import batches, encode_text, read_text
