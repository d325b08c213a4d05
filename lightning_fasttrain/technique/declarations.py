"""Declarations of a technique: exactness, order of surgery, capabilities, conflicts, and settings worth trying."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Protocol, runtime_checkable

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.messages import explain


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
    ADAPTS_LAYERS = "quantises or freezes linear layers, and trains adapters beside them"


@runtime_checkable
class CanDo(Protocol):
    """The part of a technique that :class:`Conflict` needs, which is defined below it."""

    def does(self, capability: Capability) -> bool: ...


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
    when: Callable[[Any, Any], bool] = lambda technique, other: True

    def names(self, other: object) -> bool:
        """Whether ``other`` is of this class, or a technique with this capability."""
        if isinstance(self.other, Capability):
            return isinstance(other, CanDo) and other.does(self.other)
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
