"""What the techniques that share one closure say about themselves, and are told."""

from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
from torch.optim import Optimizer

from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import LossSplit
from lightning_fasttrain.data.out_of_memory.deferred_gradient_sync import Together
from lightning_fasttrain.data.out_of_memory.fallbacks import FurtherSavings
from lightning_fasttrain.data.trunk.find_trunk import Through


class SharedSplit:
    """What copies of a technique that take the same steps tell one another, so that only the first has to try.

    A copy of it is itself: a technique that has one shares it with its own copies.

    Attributes:
        split: what one of them has found.
        seconds: that it took.
    """

    def __init__(self) -> None:
        self.split: LossSplit | None = None
        self.seconds = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedSplit":
        return self


class Counting(Protocol):
    """What both kinds of technique say about weighing, and are told."""

    count: Count
    check: bool
    found: LossSplit | None
    found_before: CountRule | None
    shared: SharedSplit | None


class Splitter(Counting, Protocol):
    """One that runs a batch in parts."""

    n: int
    adaptive: bool
    parts: int
    split: Callable[[Any, int], list[Any]]
    savings: FurtherSavings
    together: Together
    through: Through | None


class Window(Counting, Protocol):
    """One that sums the gradients of several batches."""

    reference: Any

    @property
    def holds_one_batch(self) -> bool: ...

    def take_reference(self, trainer: L.Trainer, size: Number) -> None: ...

    def add(self, targets: Number, optimizer: Optimizer) -> None: ...
