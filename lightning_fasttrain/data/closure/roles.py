"""Protocols of the techniques that share one closure."""

from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
from torch.optim import Optimizer

from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import LossSplit
from lightning_fasttrain.data.out_of_memory.deferred_gradient_sync import Together
from lightning_fasttrain.data.out_of_memory.fallbacks import FurtherSavings
from lightning_fasttrain.data.padding.trim_search import TrimSearch
from lightning_fasttrain.data.trunk.find_trunk import Through


class Counting(Protocol):
    """The attributes that both kinds of technique have for the weighting of micro-batches."""

    count: Count
    check: bool
    found: LossSplit | None
    found_before: CountRule | None


class Splitter(Counting, Protocol):
    """A technique that runs a batch in micro-batches."""

    n: int
    adaptive: bool
    parts: int
    split: Callable[[Any, int], list[Any]]
    savings: FurtherSavings
    together: Together
    through: Through | None
    trimming: TrimSearch


class Window(Counting, Protocol):
    """A technique that sums the gradients of several batches."""

    reference: Any

    @property
    def holds_one_batch(self) -> bool: ...

    def take_reference(self, trainer: L.Trainer, size: Number) -> None: ...

    def add(self, targets: Number, optimizer: Optimizer) -> None: ...
