"""A step whose memory is predicted, as techniques change it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer


@dataclass
class PredictedStep:
    """The memory of a step as techniques change it; each writes its share in ``Technique.predict``.

    Attributes:
        precision: as the Trainer means it.
        on_cuda: whether it is predicted for a GPU.
        split: batch → the parts that are run one after the other.
        window: batches whose gradients are summed.
        releases: whether gradients are freed right after the optimizer's step.
        prefetches: whether the next batch is on the device too.
        on_optimizer: each is called with the optimizer when it is made.
        notes: sentences on what is not counted.
    """

    precision: str = "32-true"
    on_cuda: bool = False
    split: Callable[[Any], Sequence[Any]] = lambda batch: [batch]
    window: int = 1
    releases: bool = False
    prefetches: bool = False
    on_optimizer: list[Callable[[Optimizer], Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, technique: object, why: str) -> None:
        """Note that a technique is not part of the prediction: which bound that leaves, and why."""
        self.notes.append(f"{type(technique).__name__} is left out: {why}.")
