"""What the techniques that share one closure say about themselves, and are told."""

from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
from torch.optim import Optimizer

from lightning_fasttrain.data.fitting._alone_then_together import Together
from lightning_fasttrain.data.fitting.further_savings import FurtherSavings
from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import LossSplit
from lightning_fasttrain.data.trunk.find_trunk import Through


class Counting(Protocol):
    """What both kinds of technique say about weighing, and are told."""

    count: Count
    check: bool
    found: LossSplit | None
    found_before: CountRule | None


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
