"""Facts about the model and the device that techniques base their advice on."""

import importlib.util
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.heads import find_heads

NO_BLOCKS = "no repeated blocks were found: name them in blocks="
COMPILERS = ("g++", "clang++", "c++", "cl")


@dataclass(frozen=True)
class Facts:
    """Facts about a model and a machine before a run; None where unknown.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        devices: that train together.
        compiler: whether ``torch.compile`` can work.
        blocks: repeated blocks in the model.
        heads: layers that turn features into predictions.
        trains: share of the parameters that require a gradient.
        precision: as Lightning means it.
        accumulates: batches whose gradients are summed in a step.
        clips: how the Trainer clips gradients: ``"norm"``, ``"value"`` or ``"no"``.
    """

    device: str
    devices: int = 1
    compiler: bool | None = None
    blocks: int | None = None
    heads: int | None = None
    trains: float | None = None
    precision: str | None = None
    accumulates: int | None = None
    clips: str | None = None


def why_no_blocks(facts: Facts) -> str | None:
    """Return why a technique that acts on blocks cannot: the model has none. None if it has some, or is unknown."""
    if facts.blocks == 0:
        return NO_BLOCKS
    return None


def facts_of_machine() -> Facts:
    """Return the facts about this machine alone."""
    on_cuda = torch.cuda.is_available()
    has_triton = importlib.util.find_spec("triton") is not None
    # On the CPU Inductor writes C++, on CUDA Triton, which compiles its launchers against Python's headers too.
    compiler = find_compiler() is not None and has_python_headers() and (has_triton or not on_cuda)
    return Facts("cuda" if on_cuda else "cpu", compiler=compiler)


def add_model(facts: Facts, model: nn.Module) -> Facts:
    """Return the facts with the numbers of blocks and heads of a model."""
    try:
        blocks = len(find_blocks(model))
    except ValueError:  # there are none, or they cannot be told apart
        blocks = 0
    return replace(facts, blocks=blocks, heads=len(find_heads(model)))


def describe_clipping(value: float | None, algorithm: str | None) -> str:
    """Return how a Trainer with these settings clips gradients: ``"norm"``, ``"value"`` or ``"no"``."""
    return (algorithm or "norm") if value else "no"


def find_compiler() -> str | None:
    """Return the name of the C++ compiler that ``torch.compile`` would use on the CPU; None if there is none."""
    return next((name for name in COMPILERS if shutil.which(name)), None)


def has_python_headers() -> bool:
    """Whether C++ code can be compiled against this Python."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()
