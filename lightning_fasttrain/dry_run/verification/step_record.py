"""What came of a few steps: digests of gradients, weights and buffers, losses, and what the run left behind."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from lightning_fasttrain.dry_run.verification.digest import Digest

Digests = dict[str, Digest]


@dataclass
class StepRecord:
    """What a few steps gave, by the names of parameters and buffers.

    Attributes:
        losses: of each batch; none where several batches make a step.
        gradients: of each optimizer step, before clipping; those of later steps under ``"name, step 2"``.
        reached: which sampled entries of each weight ever had a gradient other than zero.
        before, after: the weights that train, at the start and at the end.
        unmoved: names of the weights that do not train.
        frozen: those of them that were changed nevertheless, at the end.
        buffers: at the end.
        validated: what validation returned and logged, and what ``predict_step`` returned.
        evaluation: the first batch's loss in evaluation, at the start and at the end; None where it is not known.
        training: its loss in training without dropout, at the end.
        base: its loss in evaluation with the adapters switched off, at the end; None if there are none.
        trains: names of the parameters that require a gradient.
        unheld: those of them that no optimizer has.
        modes: whether each module is in training mode, in the last step and in validation.
        state: shapes and dtypes of what ``state_dict`` gives.
        numbers: fingerprints of the random states after each step.
        left_behind: which modules have hooks or another ``forward`` when the fit is over.
        quantized: whether the model has quantised layers.
        draws: whether the first step drew random numbers.
        idle: name of a technique that did nothing → why.
        warnings: what the suite warned about.
        left: sentences on large weights that are frozen as they were, beside others that techniques took hold of.
    """

    losses: list[float] = field(default_factory=list)
    gradients: Digests = field(default_factory=dict)
    reached: dict[str, Tensor] = field(default_factory=dict)
    before: Digests = field(default_factory=dict)
    after: Digests = field(default_factory=dict)
    unmoved: list[str] = field(default_factory=list)
    frozen: Digests = field(default_factory=dict)
    buffers: Digests = field(default_factory=dict)
    validated: Digests = field(default_factory=dict)
    evaluation: list[float | None] = field(default_factory=list)
    training: float | None = None
    base: float | None = None
    trains: list[str] = field(default_factory=list)
    unheld: list[str] = field(default_factory=list)
    modes: dict[str, dict[str, bool]] = field(default_factory=dict)
    state: dict[str, tuple[object, ...]] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    left_behind: dict[str, tuple[object, ...]] = field(default_factory=dict)
    quantized: bool = False
    draws: bool = False
    idle: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def updates(self) -> Iterator[tuple[str, Digest]]:
        """What the optimizer added to each weight, one after another."""
        for name, before in self.before.items():
            yield name, self.after[name] - before

    def gradients_of(self, name: str) -> list[Digest]:
        """The gradients of one weight in each step that it has one in."""
        return [digest for key, digest in self.gradients.items() if key.partition(", step ")[0] == name]
