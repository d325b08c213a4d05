"""Split the loss of a batch by each micro-batch's own normalizer, and by counted targets."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.data.normalizer.count_targets import CountRule, CountTargets
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.read_normalizers import Slot, Term, multiply, read_normalizers
from lightning_fasttrain.data.normalizer.summed_values import count_summed
from lightning_fasttrain.data.normalizer.trial.runs import Run

LogRule = str | CountRule
_ROUNDING = 1e-4  # readings of one normalizer differ by less, distinct normalizers eventually by more


class OtherSplitError(Exception):
    """Raised when a micro-batch's loss has other terms or other normalizers than the samples that were tried."""


@dataclass(frozen=True)
class Reading:
    """The information about its weight in one micro-batch's loss.

    Attributes:
        divisor: the divisor of the loss; None where it is a sum.
        count: how much of the divisor this micro-batch counts: less where a divisor is clamped away from zero.
        others: the divisors of the other terms, which must be proportional to it.
        factors: values that must be the same in all micro-batches of a step.
        nodes: the reductions, through which a micro-batch without targets must send no NaN.
        unclear: whether the count cannot be determined; on the device, if necessary.
    """

    divisor: Number | None = None
    count: Number | None = None
    others: tuple[Number, ...] = ()
    factors: tuple[Number, ...] = ()
    nodes: tuple[Any, ...] = ()
    unclear: bool | Tensor = False


@dataclass(frozen=True)
class ReadNormalizer:
    """Read a micro-batch's weight from its own loss, as found from a few samples.

    Attributes:
        structure: the structure of the losses that it applies to.
        varying: for each term, the indices of its slots that depend on the samples; the others are factors.
        term: the term whose normalizer is the weight; None where the loss is a sum.
        others: terms whose normalizer is proportional to it.
        offset: the constant added to a count, such as an epsilon.
        summed: the ratio of the number of summed elements to the divisor; None where the graph does not show it.
        name: the normalizer in words.
    """

    structure: tuple[str, ...]
    varying: tuple[tuple[int, ...], ...]
    term: int | None = None
    others: tuple[int, ...] = ()
    offset: float = 0.0
    summed: float | None = None
    name: str = field(default="1 (the loss is a sum over samples)", compare=False)

    def __str__(self) -> str:
        return self.name

    def count_in(self, run: Run) -> float:
        """Return the count that the loss of a run shows, in Python numbers."""
        assert self.term is not None
        term = run.terms[self.term]
        divisor = float(count_of(term.slots, self.varying[self.term]))
        if term.summed == 0 and divisor <= 1:
            return 0.0  # the divisor is kept from zero, as by clamp(min=1)
        return divisor - self.offset

    def read(self, loss: Tensor) -> Reading:
        """Raises: OtherSplitError: the loss was computed by other operations, or its count cannot be determined."""
        read = read_normalizers(loss)
        if read.structure != self.structure:
            raise OtherSplitError("its loss has other terms than that of the samples that were tried")
        factors: list[Number] = []
        for term, varying in zip(read.terms, self.varying, strict=True):
            factors += [on_host(slot.value) for place, slot in enumerate(term.slots) if place not in varying]
        if self.term is None:
            return Reading(factors=tuple(factors))
        term = read.terms[self.term]
        divisor = count_of(term.slots, self.varying[self.term])
        others = tuple(count_of(read.terms[place].slots, self.varying[place]) for place in self.others)
        # The other reductions send no NaN: a mean over nothing has no gradient.
        nodes = tuple(one.node for one in read.terms if one.kind in ("sum", "quotient"))
        count, unclear = self._count(term, divisor, loss.detach())
        return Reading(divisor, count, others, tuple(factors), nodes, unclear)

    def _count(self, term: Term, divisor: Number, loss: Tensor) -> tuple[Number, bool | Tensor]:
        """Return the count, and whether it cannot be determined."""
        count = divisor - self.offset if self.offset else divisor
        if term.kind == "mean" or (isinstance(divisor, float | int) and divisor > 1):
            return count, False
        if self.summed is not None and (summed := count_summed(term.node)) is not None:
            counted = on_host(summed) * self.summed
            # The divisor may also be the count 0, kept from zero.
            return counted, differ(count, counted) & (counted != 0)
        # It may be clamped away from zero, as by clamp(min=1), or be zero beside a nonzero sum.
        unclear = loss.isinf() | ((divisor > 0) & (divisor <= 1))
        if unclear.device.type == "cpu":
            return count, bool(unclear)
        return count, unclear


def count_of(slots: Sequence[Slot], varying: Sequence[int]) -> Number:
    """Return the normalizer of a term: the product of its varying divisors, over that of its varying factors."""
    count: Number = 1
    for place in varying:
        value = on_host(slots[place].value)
        if slots[place].divides:
            count = multiply(count, value)
        elif isinstance(value, float | int) and value == 0:
            return 0
        else:
            count = count / value
    return count


def on_host(value: Number) -> Number:
    """Return the value as a Python number, unless that would wait for a device."""
    if isinstance(value, Tensor) and value.device.type == "cpu":
        return float(value)
    return value


def differ(one: Number, other: Number) -> bool | Tensor:
    """Whether two numbers differ by more than rounding: a tensor if one of them is on a device."""
    if not (isinstance(one, Tensor) or isinstance(other, Tensor)):
        return one != other and not abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
    device = one.device if isinstance(one, Tensor) else other.device  # pyright: ignore[reportAttributeAccessIssue]
    one = torch.as_tensor(one, dtype=torch.float32, device=device)
    other = torch.as_tensor(other, dtype=torch.float32, device=device)
    return (one - other).abs() > _ROUNDING * torch.maximum(one.abs(), other.abs())


@dataclass
class LossSplit:
    """The rule that splits a loss into the losses of its micro-batches.

    Attributes:
        read: how the weight of a micro-batch is read from its loss; None where the user's ``count`` gives it, or it
            cannot be read.
        count: the function that gives the weights without running the model; None where it is not known.
        scale: the ratio of the read normalizer to the count.
        provisional: whether the samples showed nothing, so that others must be tried.
        per_sample: the approximate count per sample.
        log_rules: for each value that the step logs, the rules that combine it, the likeliest first: several where the
            samples could not decide, none where no rule gives the value of the unsplit samples.
        leaves: the leaf tensors of the samples' loss.
    """

    read: ReadNormalizer | None
    count: CountTargets | None
    scale: float = 1.0
    provisional: bool = field(default=False, compare=False)
    per_sample: float = field(default=1.0, compare=False)
    log_rules: dict[str, tuple[LogRule, ...]] = field(default_factory=dict, compare=False)
    leaves: tuple["weakref.ref[Tensor]", ...] = field(default=(), compare=False)

    @property
    def parameters(self) -> list[Tensor]:
        """The leaf tensors that the loss has gradients for, as far as they still exist."""
        leaves = [reference() for reference in self.leaves]
        return list(filter(torch.is_tensor, leaves))

    @property
    def is_sum(self) -> bool:
        """Whether the losses of micro-batches are added unweighted."""
        if self.read is not None:
            return self.read.term is None
        return self.count == CountRule("sum")

    def count_in(self, run: Run) -> float | None:
        """Return the count of a run by this rule; None where losses are added unweighted, or it does not apply."""
        if self.is_sum or (self.read is not None and run.structure != self.read.structure):
            return None
        if self.read is not None:
            return self.read.count_in(run)
        if self.count is None:
            return None
        return float(self.count(run.batch))

    def list_weights(self, runs: Sequence[Run]) -> list[float]:
        """Return the weights of the runs of all micro-batches of a batch."""
        counts = [self.count_in(run) or 0.0 for run in runs]
        if self.is_sum:
            return [1.0] * len(runs)
        total = sum(counts) or 1.0
        return [count / total for count in counts]

    def __str__(self) -> str:
        if self.read is not None:
            return str(self.read)
        if isinstance(self.count, CountRule):
            return str(self.count)
        return "count="
