"""Declarations of a technique, and the facts about model, machine and predicted step that they are based on."""

import importlib.util
import itertools
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.heads import find_heads


class Exactness(Enum):
    """Classes of agreement with the plain training run, most exact first; tests hold each technique to its class."""

    EXACT = "exact"
    TOLERANCE = "tolerance"
    CHANGES_TRAINING = "changes_training"


def least_exact(*classes: Exactness) -> Exactness:
    """Return the class of several techniques together: that of the least exact one; of none, exact.

    Example:
        >>> least_exact(Exactness.EXACT, Exactness.TOLERANCE).value
        'tolerance'
    """
    return max(classes, key=list(Exactness).index, default=Exactness.EXACT)  # an enum lists its members in order


class Surgery(IntEnum):
    """Order in which techniques operate on a model, however they were listed."""

    QUANTIZE = 1
    ADAPT = 2
    ARCHITECTURE = 3
    CHECKPOINT = 4
    COMPILE = 5
    ROUTE = 6
    OFFLOAD = 7
    UNPAD = 8
    SHARD = 9


class Capability(Enum):
    """An effect of a technique on the step that other techniques depend on, whichever class has it."""

    SPLITS_BATCHES = "runs forward and backward several times for one batch"
    SUMS_BATCHES = "sums the gradients of several batches, and saves them with a checkpoint"
    KEEPS_GLOBAL_BATCH = "reads the same global batches on any number of ranks"
    UPDATES_IN_BACKWARD = "updates each weight while the backward still runs"
    TRIMS_PADDING = "looks for padding in each batch, and cuts it off where that is exact"
    REPLACES_PRODUCTS = "replaces the matrix products of linear layers"
    COMPILES_BLOCKS = "compiles blocks for the shapes of their inputs"
    TILES_MLPS = "runs MLPs on a part of the tokens at a time"
    EVALUATES_AVERAGES = "evaluates with other weights than those that train"
    GATHERS_PARAMETERS = "gathers parameters from other ranks inside of each forward and backward"
    ACTS_IN_BACKWARD = "acts in Python while the backward runs"
    ADAPTS_LAYERS = "quantises or freezes linear layers, and trains adapters beside them"


def _always(technique: object, other: object) -> bool:
    return True


def _as_one(batch: Any) -> Sequence[Any]:
    return [batch]


def _ignore(_: object) -> None:
    pass


@check_arguments
@dataclass(frozen=True)
class Conflict:
    """A class or capability that a technique cannot be combined with, and the alternative.

    Args:
        other: what another technique does, or a class: a technique, a strategy, a callback of the host's. Subclasses
            are meant too.
        why: half a sentence.
        way_out: the cheapest.
        when: (technique, the other) → whether they conflict as they are set; by default always.
    """

    other: type | Capability
    why: str
    way_out: str
    when: Callable[[Any, Any], bool] = _always

    def names(self, other: object) -> bool:
        """Whether ``other`` is of this class, or a technique with this capability."""
        if isinstance(self.other, Capability):
            does = getattr(other, "does", None)  # of a technique
            return does is not None and does(self.other)
        return isinstance(other, self.other)

    def may_name(self, kind: type) -> bool:
        """Whether the conflict may concern objects of a class."""
        if isinstance(self.other, Capability):
            return self.other in getattr(kind, "capabilities", ())
        return issubclass(kind, self.other)


def refuse_conflicts(one: object, conflicts: Iterable[Conflict], others: Iterable[object]) -> None:
    """Refuse the first of ``others`` that cannot be combined with ``one``.

    Raises:
        ValueError: both names · why · the cheapest way out.
    """
    for conflict, other in itertools.product(conflicts, others):
        if other is not one and conflict.names(other) and conflict.when(one, other):
            names = f"{type(one).__name__} + {type(other).__name__}"
            raise ValueError(explain(names, conflict.why, conflict.way_out))


@check_arguments
@dataclass(frozen=True)
class Setting:
    """A setting of a technique that the planner may try.

    Args:
        axis: what it decides there: a field of a planner's choice. Of one axis one setting is used.
        word: its name in the axis.
        arguments: by name: numbers, words, and policies made of such.
        cost: factor on the time of a step, until that is measured.
        device: type of the only device on which it differs from another setting; "" for all.
    """

    axis: str
    word: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cost: PositiveFloat = 1.0
    device: str = ""


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
        convolutions: 2-D convolutions in the model.
        trains: share of the parameters that require a gradient.
        precision: as Lightning means it.
        accumulates: batches whose gradients are summed in a step.
        clips: how the Trainer clips gradients: ``"norm"``, ``"value"`` or ``"no"``.
        batch: what a batch holds: ``"images"``, ``"tokens"`` or ``"other"``.
    """

    device: str
    devices: int = 1
    compiler: bool | None = None
    blocks: int | None = None
    heads: int | None = None
    convolutions: int | None = None
    trains: float | None = None
    precision: str | None = None
    accumulates: int | None = None
    clips: str | None = None
    batch: str | None = None


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
    """Return the facts with the numbers of blocks, heads and 2-D convolutions of a model."""
    try:
        blocks = len(find_blocks(model))
    except ValueError:  # there are none, or they cannot be told apart
        blocks = 0
    convolutions = sum(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())
    return replace(facts, blocks=blocks, heads=len(find_heads(model)), convolutions=convolutions)


def describe_clipping(value: float | None, algorithm: str | None) -> str:
    """Return how a Trainer with these settings clips gradients: ``"norm"``, ``"value"`` or ``"no"``."""
    return (algorithm or "norm") if value else "no"


def find_compiler() -> str | None:
    """Return the name of the C++ compiler that ``torch.compile`` would use on the CPU; None if there is none."""
    return next((name for name in COMPILERS if shutil.which(name)), None)


def has_python_headers() -> bool:
    """Whether C++ code can be compiled against this Python."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


@dataclass
class PredictedStep:
    """A training step as techniques change its memory; each technique modifies it in ``Technique.predict``.

    Attributes:
        precision: Lightning's name of the precision.
        on_cuda: whether it is predicted for a GPU.
        split: batch → its micro-batches, which run one after the other.
        window: number of batches whose gradients are summed.
        releases: whether gradients are freed right after the optimizer's step.
        prefetches: whether the next batch is on the device too.
        on_optimizer: functions that are called with the new optimizer.
        without_reduction: context of all micro-batches but the last, in which ranks do not reduce gradients.
        not_stored: is called with each tensor that compiled code does not store, while a step is traced.
        notes: sentences on memory that is not counted.
    """

    precision: str = "32-true"
    on_cuda: bool = False
    split: Callable[[Any], Sequence[Any]] = _as_one
    window: int = 1
    releases: bool = False
    prefetches: bool = False
    on_optimizer: list[Callable[[Optimizer], Any]] = field(default_factory=list)
    without_reduction: Callable[[], AbstractContextManager[Any]] = nullcontext
    not_stored: Callable[[Any], object] = _ignore
    notes: list[str] = field(default_factory=list)

    def leave_out(self, technique: object, why: str) -> None:
        """Add a note that a technique is not part of the prediction, with the reason."""
        self.notes.append(f"{type(technique).__name__} is left out: {why}.")
