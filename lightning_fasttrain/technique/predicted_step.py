"""Description of a training step for memory predictions, which techniques modify."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer


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
        notes: sentences on memory that is not counted.
    """

    precision: str = "32-true"
    on_cuda: bool = False
    split: Callable[[Any], Sequence[Any]] = lambda batch: [batch]
    window: int = 1
    releases: bool = False
    prefetches: bool = False
    on_optimizer: list[Callable[[Optimizer], Any]] = field(default_factory=list)
    without_reduction: Callable[[], AbstractContextManager[Any]] = nullcontext
    notes: list[str] = field(default_factory=list)

    def leave_out(self, technique: object, why: str) -> None:
        """Add a note that a technique is not part of the prediction, with the reason."""
        self.notes.append(f"{type(technique).__name__} is left out: {why}.")
