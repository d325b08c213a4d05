"""The results of a step on some samples, and the error of the weighted sum over their micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.data.normalizer.log_rules import LoggedValue
from lightning_fasttrain.data.normalizer.read_normalizers import Kind, Term
from lightning_fasttrain.data.normalizer.summed_values import count_summed, is_of_parameters

_ENTRIES = 4096  # per parameter's gradient; equal sums are equal in every entry, so a sample of them suffices
LOW = (torch.bfloat16, torch.float16)
# Summed over thousands of tokens in 16 bits, the gradient of a bias is off by a fifth or more, unsplit or not, so that
# only large gradients are conclusive there.
_LOW_FLOOR = 3.0


@dataclass(frozen=True)
class ReadTerm:
    """A term of a loss in Python numbers: :class:`~.read_normalizers.Term` without the graph."""

    kind: Kind
    name: str
    slots: tuple[tuple[float, bool], ...]
    summed: float | None
    of_parameters: bool
    ignored: int | None = None


def as_numbers(term: Term) -> ReadTerm:
    """Return a term without its graph; this waits for the device."""
    summed = count_summed(term.node) if term.kind in ("sum", "quotient") else None
    slots = tuple((float(slot.value), slot.divides) for slot in term.slots)
    ignored = getattr(term.node, "_saved_ignore_index", None)
    if ignored is not None and ignored >= 2**63:  # autograd stores it unsigned
        ignored -= 2**64
    summed = None if summed is None else float(summed)
    return ReadTerm(term.kind, term.name, slots, summed, is_of_parameters(term.node), ignored)


@dataclass
class Run:
    """The result of one run of a step.

    Attributes:
        gradient: some entries of each parameter's gradient, concatenated, in float64 on the CPU.
        entries: the same for each leaf of its graph.
        terms: the terms of its loss.
        structure: the operations of its loss on scalars.
        logged: the scalars that it logged.
        changed: names of the buffers that it changed.
        drawn: the states of Python's and NumPy's generators at its end.
    """

    loss: float
    gradient: Tensor
    entries: dict[Tensor, Tensor] = field(default_factory=dict)
    terms: tuple[ReadTerm, ...] = ()
    structure: tuple[str, ...] = ()
    logged: dict[str, LoggedValue] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    drawn: tuple[Any, ...] = ()

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Keep the gradients of these parameters alone; zeros where a loss does not depend on one."""
        nothing = torch.zeros(0, dtype=torch.float64)  # cat refuses an empty list
        parts = [self.entries.get(parameter, entries_of(parameter, None)) for parameter in parameters]
        self.gradient = torch.cat([nothing, *parts])

    @property
    def everything(self) -> Tensor:
        return torch.cat([torch.tensor([self.loss]).double(), self.gradient])

    @property
    def is_zero(self) -> bool:
        """Whether the gradient is zero, as without targets; or the loss, if no gradients were computed."""
        return not self.gradient.any() if self.gradient.numel() else self.loss == 0

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.everything).all())


@dataclass
class Split:
    """A run, and the runs of the micro-batches that its samples were split into.

    Attributes:
        parameters: the parameters whose gradients the runs hold.
    """

    micro_batches: list[Any]
    whole: Run
    runs: list[Run]
    parameters: list[Tensor]

    def error(self, weights: Sequence[float], floor: float) -> float:
        """Return the relative error of ``Σ weight · micro-batch``: the largest of the loss and all parameters.

        A parameter whose gradient is below ``floor`` times the average is compared with that instead, but never with
        more than all gradients together.
        """
        # A micro-batch without counted elements has a mean of NaN, and a weight of 0.
        used = [(w, run) for w, run in zip(weights, self.runs, strict=True) if w != 0]
        if not all(run.is_finite for _, run in used):
            return float("inf")
        size = max([abs(self.whole.loss), *(abs(w * run.loss) for w, run in used)])
        missed = abs(self.whole.loss - sum(w * run.loss for w, run in used))
        norms = self._norms(self.whole.gradient)
        low = torch.tensor([parameter.dtype in LOW for parameter in self.parameters], dtype=torch.bool)
        least = norms.square().mean().sqrt() * torch.where(low, _LOW_FLOOR, floor)
        missed_norms = self._norms(sum((-w * run.gradient for w, run in used), self.whole.gradient))
        # 1e-300: if a parameter has no gradient at all, 0 / 0 would be NaN.
        errors = missed_norms / torch.maximum(norms, least.clamp(max=self.norm)).clamp(min=1e-300)
        return max([missed / size if size else 0.0, *errors.tolist()])

    @property
    def norm(self) -> float:
        return float(self.whole.gradient.norm())

    def _norms(self, gradient: Tensor) -> Tensor:
        """Return the norm of each parameter's entries."""
        sizes = torch.tensor([len(_choose_entries(parameter)) for parameter in self.parameters], dtype=torch.int64)
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        return torch.zeros(len(sizes), dtype=gradient.dtype).index_add(0, owner, gradient.square()).sqrt()


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the norm of ``one - other``, relative to that of ``one``."""
    # 1e-30: if both are zero, 0 / 0 would be NaN.
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


def entries_of(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(len(_choose_entries(parameter)), dtype=torch.float64)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.detach().reshape(-1)[:: _choose_entries(parameter).step].cpu().double()


def _choose_entries(parameter: Tensor) -> range:
    """Choose which entries of a gradient are compared, spread over it; an odd step meets every column."""
    return range(0, parameter.numel(), (parameter.numel() // _ENTRIES) | 1)
