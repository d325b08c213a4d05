"""Results of a few steps: digests of gradients, weights and buffers, losses, and side effects."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from lightning_fasttrain.dry_run.verification.digest import Digest

Digests = dict[str, Digest]


@dataclass
class StepRecord:
    """Results of a few steps, by the names of parameters and buffers.

    Attributes:
        losses: loss of each batch; empty if several batches make a step.
        gradients: of each optimizer step, before clipping; those of later steps under ``"name, step 2"``.
        reached: the sampled entries of each weight that ever had a nonzero gradient.
        before, after: the trainable weights, at the start and at the end.
        unmoved: names of the weights that do not train.
        frozen: those of them that changed nevertheless, at the end.
        buffers: buffers at the end.
        validated: results that validation returned and logged, and that ``predict_step`` returned.
        evaluation: the first batch's loss in evaluation, at the start and at the end; None if it is not known.
        training: its loss in training without dropout, at the end.
        base: its loss in evaluation with the adapters disabled, at the end; None if there are none.
        trains: names of the parameters that require a gradient.
        unheld: those of them that no optimizer holds.
        modes: whether each module is in training mode, in the last step and in validation.
        state: shapes and dtypes of the entries of ``state_dict``.
        numbers: fingerprints of the random states after each step.
        left_behind: modules that have hooks or a replaced ``forward`` when the fit is over.
        quantized: whether the model has quantized layers.
        draws: whether the first step drew random numbers.
        idle: name of a technique that did nothing → the reason.
        warnings: warnings of the suite.
        left: sentences on large frozen weights that techniques left unchanged, unlike others.
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
        """Yield the optimizer's total change of each weight."""
        for name, before in self.before.items():
            yield name, self.after[name] - before

    def gradients_of(self, name: str) -> list[Digest]:
        """Return the gradients of one weight in each step in which it has one."""
        return [digest for key, digest in self.gradients.items() if key.partition(", step ")[0] == name]
