"""Split the loss of a batch by each micro-batch's own normalizer, and by counted targets."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.data.normalizer.count_targets import CountRule, CountTargets, is_sum, weights_of
from lightning_fasttrain.data.normalizer.log_rules import FoundRule
from lightning_fasttrain.data.normalizer.micro_batch_weights import (
    MicroBatchWeights,
    Number,
    add_counts,
    scale_loss,
)
from lightning_fasttrain.data.normalizer.read_normalizers import Slot, Term, count_summed, read_normalizers

_UNCLEAR = "its divisor may be clamped away from zero, or is zero beside a nonzero sum"
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
        term: the term whose normalizer is the weight; None where the loss is a sum.
        others: terms whose normalizer is proportional to it.
        varying: for each term, the indices of its slots that depend on the samples; the others are factors.
        offset: the constant added to a count, such as an epsilon.
        summed: the ratio of the number of summed elements to the divisor; None where the graph does not show it.
        name: the normalizer in words.
    """

    structure: tuple[str, ...]
    term: int | None
    others: tuple[int, ...]
    varying: tuple[tuple[int, ...], ...]
    offset: float
    summed: float | None
    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name

    def read(self, loss: Tensor) -> Reading:
        """Raises: OtherSplitError: the loss was computed by other operations, or its count cannot be determined."""
        read = read_normalizers(loss)
        if read.structure != self.structure:
            raise OtherSplitError("its loss has other terms than that of the samples that were tried")
        factors: list[Number] = []
        for term, varying in zip(read.terms, self.varying, strict=True):
            factors += [_on_host(slot.value) for place, slot in enumerate(term.slots) if place not in varying]
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
        summed = None if self.summed is None else count_summed(term.node)
        if self.summed is not None and summed is not None:
            counted = _on_host(summed) * self.summed
            return counted, _is_neither(count, counted)
        # It may be clamped away from zero, as by clamp(min=1), or be zero beside a nonzero sum.
        if isinstance(divisor, float | int) and loss.device.type == "cpu":
            return count, divisor > 0 or bool(loss.isinf())
        divided = torch.as_tensor(divisor, device=loss.device)
        return count, ((divided > 0) & (divided <= 1)) | loss.isinf()


def _is_neither(count: Number, counted: Number) -> bool | Tensor:
    """Whether a divisor is neither the count nor a clamped count of zero."""
    if isinstance(count, Tensor) or isinstance(counted, Tensor):
        missed = torch.as_tensor(count - counted).abs()
        return (missed > _ROUNDING * abs(counted)) & torch.as_tensor(counted != 0, device=missed.device)
    return counted != 0 and not _is_near(count, counted)


def count_of(slots: Sequence[Slot], varying: Sequence[int]) -> Number:
    """Return the normalizer of a term: the product of its varying divisors, over that of its varying factors."""
    count: Number = 1
    for place in varying:
        value = _on_host(slots[place].value)
        if slots[place].divides:
            count = value if isinstance(count, int) and count == 1 else count * value
        elif isinstance(value, float | int) and value == 0:
            return 0
        else:
            count = count / value
    return count


def _on_host(value: Number) -> Number:
    """Return the value as a Python number, unless that would wait for a device."""
    return float(value) if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _as_host_bool(value: Tensor) -> bool | Tensor:
    return bool(value) if value.device.type == "cpu" else value


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
        log_rules: how each value that the step logs is combined.
        leaves: the leaf tensors of the samples' loss.
    """

    read: ReadNormalizer | None
    count: CountTargets | None
    scale: float = 1.0
    provisional: bool = field(default=False, compare=False)
    per_sample: float = field(default=1.0, compare=False)
    log_rules: dict[str, FoundRule | None] = field(default_factory=dict, compare=False)
    leaves: tuple["weakref.ref[Tensor]", ...] = field(default=(), compare=False)

    @property
    def parameters(self) -> list[Tensor]:
        """The leaf tensors that the loss has gradients for, as far as they still exist."""
        found = [leaf() for leaf in self.leaves]
        return [leaf for leaf in found if leaf is not None]

    @property
    def is_sum(self) -> bool:
        """Whether the losses of micro-batches are added unweighted."""
        return self.read.term is None if self.read is not None else is_sum(self.count)

    def __str__(self) -> str:
        if self.read is not None:
            return str(self.read)
        return str(self.count) if isinstance(self.count, CountRule) else "count="


class StepWeights:
    """The weights of the micro-batches of one step.

    Where their total is known beforehand, by counting, each loss is weighted by count / total, and the normalizer read
    from it must agree. Otherwise it is weighted by count / reference, and :meth:`settle` returns the factor by which
    the gradients must be multiplied before the last backward.

    Args:
        split: how the loss is split.
        parts: the micro-batches.
        reference: the divisor of counts in a window of several batches, whose total is not known yet.

    Attributes:
        in_window: whether other batches or ranks contribute, too.
    """

    def __init__(self, split: LossSplit, parts: Sequence[Any], reference: Number | None = None) -> None:
        self.split = split
        self.parts = len(parts)
        self.reference = reference
        self.in_window = reference is not None
        self.losses: list[Tensor] = []
        self.readings: list[Reading] = []
        self.held: list[int] = []  # micro-batches that gave a loss
        self.known: MicroBatchWeights | None = None
        if split.is_sum:
            one: Number = 1 if reference is None else reference
            self.known = MicroBatchWeights([1] * self.parts, one)
        elif split.count is not None:
            counts, total = weights_of(split.count, parts)
            self.known = MicroBatchWeights(counts, total if reference is None else reference)

    def scale_loss(self, loss: Tensor, part: int) -> Tensor:
        """Return the micro-batch's share of the loss of the step.

        Raises: OtherSplitError: the normalizer read from the loss does not match the rule that was found, or the count.
        """
        self.losses.append(loss.detach())
        self.held.append(part)
        reading = None if self.split.read is None else self.split.read.read(loss)
        if reading is not None:
            self.readings.append(replace(reading, nodes=()))  # free the graph before the next micro-batch runs
        if self.known is not None:
            if reading is not None:
                self._refuse_other(reading, part)
                if self._counts_nothing(part):
                    return loss
                _silence(reading, self.known.counts[part])
            return self.known.scale_loss(loss, part)
        assert reading is not None
        assert reading.count is not None
        assert reading.divisor is not None
        if reading.unclear is True:
            raise OtherSplitError(_UNCLEAR)
        if self.reference is None:
            self.reference = _estimate_total(reading.count, self.parts)
        if self._counts_nothing(part):
            return loss
        _silence(reading, reading.divisor)
        return scale_loss(loss, reading.divisor, self.reference)

    def _counts_nothing(self, part: int) -> bool:
        """Whether this is the last micro-batch and none has a count; then it is treated as the unsplit step."""
        return part == self.parts - 1 and not self.in_window and _is_zero(_on_host(self.total))

    def _refuse_other(self, reading: Reading, part: int) -> None:
        assert self.known is not None
        counted = self.known.counts[part]
        if reading.count is None or (isinstance(counted, Tensor) and counted.device.type != "cpu"):
            return  # values on a device are compared in `disagreement`
        if isinstance(reading.count, float | int):
            expected = float(counted) * self.split.scale
            if abs(reading.count - expected) > _ROUNDING * max(abs(expected), abs(reading.count)):
                what = f"its loss is divided by {reading.count:.6g} where {expected:.6g} was counted"
                raise OtherSplitError(what)

    @property
    def _offset(self) -> float:
        return self.split.read.offset if self.split.read is not None else 0.0

    @property
    def counts(self) -> list[Number]:
        """The counts of the micro-batches that gave a loss."""
        if self.known is not None:
            return [self.known.counts[part] for part in self.held]
        return [reading.count for reading in self.readings if reading.count is not None]

    @property
    def total(self) -> Number:
        """The normalizer of the unsplit step's loss."""
        counted = add_counts(self.counts)
        return counted if self.known is not None or _is_zero(counted) else counted + self._offset

    def settle(self, total: Number | None = None) -> Number | None:
        """Return the factor for the gradients so far and for the last loss; None where none is needed.

        Args:
            total: the total of all ranks, where they share it.
        """
        if self.known is not None or self.reference is None:
            return None
        total = self.total if total is None else total
        if isinstance(total, Tensor) or isinstance(self.reference, Tensor):
            total, reference = torch.as_tensor(total), torch.as_tensor(self.reference)
            return torch.where(total > 0, reference.to(total.device) / total, 1.0)
        return None if total in (0, self.reference) else self.reference / total

    def disagreement(self) -> bool | Tensor:
        """Whether the readings contradict a split of one loss: on the device, if necessary."""
        found: list[Tensor] = [reading.unclear for reading in self.readings if isinstance(reading.unclear, Tensor)]
        for one, other in self._pairs_that_must_agree():
            if isinstance(one, Tensor) or isinstance(other, Tensor):
                device = one.device if isinstance(one, Tensor) else other.device  # pyright: ignore[reportAttributeAccessIssue]
                one, other = (torch.as_tensor(x, dtype=torch.float32, device=device) for x in (one, other))
                found.append((one - other).abs() > _ROUNDING * torch.maximum(one.abs(), other.abs()))
            elif not _is_near(one, other):
                return True
        return _as_host_bool(torch.stack(found).any()) if found else False

    def _pairs_that_must_agree(self) -> Iterator[tuple[Number, Number]]:
        first, *rest = self.readings or [Reading()]
        for reading in rest:
            yield from zip(first.factors, reading.factors, strict=True)
        divisors = [reading.divisor for reading in self.readings if reading.divisor is not None]
        if not divisors:
            return
        if self.known is not None and any(isinstance(divisor, Tensor) for divisor in divisors):
            for reading, counted in zip(self.readings, self.counts, strict=True):
                yield reading.count, counted * self.split.scale  # pyright: ignore[reportReturnType]
        total = add_counts(divisors)
        for others in zip(*[reading.others for reading in self.readings], strict=True):
            others_total = add_counts(others)
            for divisor, other in zip(divisors, others, strict=True):
                yield other * total, divisor * others_total

    def loss(self, total: Number | None = None) -> Tensor:
        """Return the loss of the step, detached; this rank's share of it, where the total is that of all ranks."""
        if self.readings and not self.in_window and _is_zero(_on_host(self.total if total is None else total)):
            return self.losses[-1]
        if self.known is not None:
            return self.known.select(self.held).add_up(self.losses)
        total = self.total if total is None else total
        divisors = [reading.divisor for reading in self.readings if reading.divisor is not None]
        return MicroBatchWeights(divisors, total).add_up(self.losses)


class DeferredFlag:
    """Reads a boolean from a device without waiting for work that was queued after it.

    Args:
        flag: a 0-dimensional tensor.
    """

    def __init__(self, flag: Tensor) -> None:
        self._told = torch.empty((), dtype=torch.bool, pin_memory=flag.is_cuda)
        self._told.copy_(flag, non_blocking=True)
        self._event: Any = None
        if flag.device.type != "cpu":
            self._event = torch.Event(device=flag.device)
            self._event.record()

    @property
    def is_known(self) -> bool:
        """Whether reading it would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> bool:
        """Return the flag; wait until the device has computed it."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._told)


class DeferredCheck:
    """A comparison on the device, whose result is read while the device is busy with the last backward."""

    def __init__(self, disagrees: bool | Tensor) -> None:
        if disagrees is True:
            self.refuse_now()
        self._flag = DeferredFlag(disagrees) if isinstance(disagrees, Tensor) else None

    def refuse(self) -> None:
        """Raises: OtherSplitError: the readings did not agree."""
        if self._flag is not None and self._flag.read():
            self.refuse_now()

    @staticmethod
    def refuse_now() -> None:
        raise OtherSplitError("the loss of this batch has several normalizers, or factors that depend on samples")


def _estimate_total(count: Number, parts: int) -> Number:
    """Estimate the total, so that nothing overflows in float16 before the real one is known."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, count * parts, 1.0)
    return count * parts if count > 0 else 1.0


def _is_near(one: Number, other: Number) -> bool:
    return bool(one == other) or bool(abs(one - other) <= _ROUNDING * max(abs(one), abs(other)))


def _is_zero(total: Number) -> bool:
    return isinstance(total, float | int) and total == 0


def _silence(reading: Reading, count: Number) -> None:
    """Block gradients through the reductions of a micro-batch with a count of 0, where 0 / 0 would give NaN."""
    if isinstance(count, Tensor) and count.device.type != "cpu":
        keep: Callable[[Tensor], Tensor] = lambda gradient: torch.where(count > 0, gradient, 0.0)  # noqa: E731
    elif float(count) == 0:
        keep = torch.zeros_like
    else:
        return

    def silence(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(map(keep, gradients))

    for node in reading.nodes:
        node.register_prehook(silence)
