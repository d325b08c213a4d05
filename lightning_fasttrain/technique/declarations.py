"""What a technique says about itself: how exact it is, its place in surgery, its conflicts, settings worth trying."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any


class Exactness(Enum):
    """How near a technique keeps to the plain training run, most exact first; tests hold each one to its class."""

    EXACT = "exact"
    TOLERANCE = "tolerance"
    CHANGES_TRAINING = "changes_training"


def least_exact(*classes: Exactness) -> Exactness:
    """The class of several techniques together: that of the least exact one; of none, exact.

    Example:
        >>> least_exact(Exactness.EXACT, Exactness.TOLERANCE).value
        'tolerance'
    """
    return max(classes, key=list(Exactness).index, default=Exactness.EXACT)  # an enum lists its members in order


class Surgery(IntEnum):
    """The order in which models are operated on, however the techniques were listed."""

    QUANTIZE = 1
    ADAPT = 2
    ARCHITECTURE = 3
    CHECKPOINT = 4
    COMPILE = 5
    OFFLOAD = 6
    SHARD = 7


@dataclass(frozen=True)
class Conflict:
    """What a technique cannot be used beside, and what to do about it.

    Args:
        other: a class: another technique, a strategy, a callback of the host's. Subclasses are meant too.
        why: half a sentence.
        way_out: the cheapest.
        when: (technique, the other) → whether they conflict as they are set; by default always.
    """

    other: type
    why: str
    way_out: str
    when: Callable[[Any, Any], bool] = lambda technique, other: True


@dataclass(frozen=True)
class Setting:
    """How the planner may use a technique.

    Args:
        axis: what it decides there: a field of a planner's choice. Of one axis one setting is used.
        word: its name in the axis.
        arguments: by name: numbers, words, and policies made of such.
        cost: by what it multiplies the time of a step, until that is measured.
    """

    axis: str
    word: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0
