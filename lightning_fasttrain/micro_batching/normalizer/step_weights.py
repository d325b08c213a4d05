"""Weight the micro-batches of one step by the normalizers that are read from their losses, together on the device."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError
from lightning_fasttrain.micro_batching.normalizer.split_rule import (
    LossSplit,
    OtherSplitError,
    Reading,
    differ,
    on_host,
)
from lightning_fasttrain.trial.read_normalizers import Number

_SEVERAL = "the loss of this batch has several normalizers, or factors that depend on samples"
_UNCLEAR = "its divisor may be clamped away from zero, or is zero beside a nonzero sum"


class StepWeights:
    """The weights of the micro-batches of one step.

    Where their total is known beforehand, by counting, each loss is weighted by count / total, and the normalizer read
    from it must agree. Otherwise it is weighted by count / reference, and :meth:`settle` returns the factor by which
    the gradients must be multiplied before the last backward.

    Args:
        split: how the loss is split.
        parts: the micro-batches.
        reference: the divisor of counts in a window of several batches, whose total is not known yet.
        over_ranks: sums a number over the ranks that share a total, a collective; None where each has its own.
        known: the weights, where they need not be counted.
    """

    def __init__(
        self,
        split: LossSplit,
        parts: Sequence[object],
        reference: Number | None = None,
        over_ranks: Callable[[Number], Number] | None = None,
        known: "MicroBatchWeights | None" = None,
    ) -> None:
        self.split = split
        self.parts = len(parts)
        self.reference = reference
        self._over_ranks = over_ranks
        # Other batches or ranks may hold targets where this one has none.
        self._has_others = reference is not None or over_ranks is not None
        self._settled: Number | None = None
        self.losses: list[Tensor] = []
        self.readings: list[Reading] = []
        self.held: list[int] = []  # micro-batches that gave a loss
        self.known = known
        self._doubts: list[Tensor] = []  # comparisons on a device, where True is a mismatch
        counts: list[Number] = []
        total: Number = 1
        if known is not None:
            return
        if split.is_sum:
            counts = [1] * self.parts
        elif split.count is not None:
            counts = list(map(split.count, parts))
            total = add_counts(counts)
            if over_ranks is not None:
                # Either all ranks get here or none, since they found the same rule.
                total = over_ranks(total)
        if reference is not None:
            total = reference
        if counts:
            self.known = MicroBatchWeights(counts, total)

    def scale_loss(self, loss: Tensor, part: int) -> Tensor:
        """Return the micro-batch's share of the loss of the step.

        Raises: OtherSplitError: the normalizer read from the loss does not match the rule that was found, or the count.
        """
        self.losses.append(loss.detach())
        self.held.append(part)
        if self.split.read is None:
            assert self.known is not None  # such a split has a count
            return self.known.scale_loss(loss, part)
        reading = self.split.read.read(loss)
        self.readings.append(replace(reading, nodes=()))  # free the graph before the next micro-batch runs
        if reading.is_nothing and self.known is not None and self.reference is not None:
            # The total of a window is not known yet.
            self.known.counts[part] = 0
        if self.known is not None:
            weight = self.known.counts[part]
            self._compare_count(reading, weight * self.split.scale)
        else:
            self._refuse(reading.unclear, _UNCLEAR)
            assert reading.count is not None
            assert reading.divisor is not None
            weight = reading.divisor
            if self.reference is None:
                self.reference = _estimate_total(reading.count, self.parts)
        # If this is the last micro-batch and none has a count, it is treated as the unsplit step.
        if part == self.parts - 1 and self._counts_nothing():
            return loss
        _silence(reading, weight)
        if self.known is not None:
            return self.known.scale_loss(loss, part)
        assert self.reference is not None
        return MicroBatchWeights([weight], self.reference).scale_loss(loss, 0)

    def _compare_count(self, reading: Reading, expected: Number) -> None:
        if reading.count is None:
            return
        expected, why = on_host(expected), _SEVERAL
        # Formatting a number on a device would wait for it.
        if not (isinstance(reading.count, Tensor) or isinstance(expected, Tensor)):
            why = f"its loss is divided by {reading.count:.6g} where {expected:.6g} was counted"
        self._refuse(differ(reading.count, expected), why)

    def _refuse(self, differs: bool | Tensor, why: str) -> None:
        """Refuse a mismatch: at once, or in :meth:`find_mismatch` if it is being computed on a device."""
        if isinstance(differs, Tensor):
            self._doubts.append(differs)
        elif differs:
            raise OtherSplitError(why)

    def _counts_nothing(self) -> bool:
        return not self._has_others and _is_zero(on_host(self.total))

    @property
    def counts(self) -> list[Number]:
        """The counts of the micro-batches that gave a loss."""
        if self.known is not None:
            return [self.known.counts[part] for part in self.held]
        return [reading.count for reading in self.readings if reading.count is not None]

    @property
    def total(self) -> Number:
        """The normalizer of the unsplit step's loss."""
        if self.reference is not None and self.split.counts_nothing:
            return 0  # beside the other batches of its window
        counted = add_counts(self.counts)
        if self.known is not None or self.split.read is None or _is_zero(counted):
            return counted
        return counted + self.split.read.offset

    def settle(self) -> Number | None:
        """Return the factor for the gradients so far and for the last loss; None where none is needed."""
        if self.known is not None or self.reference is None:
            return None
        total = self._settled = self.total if self._over_ranks is None else self._over_ranks(self.total)
        if isinstance(total, Tensor):
            return torch.where(total > 0, self.reference / total, 1.0)
        if total in (0, self.reference):
            return None
        return self.reference / total

    def find_mismatch(self) -> AsyncReading | None:
        """Compare what was read from all micro-batches, before the last backward.

        Returns:
            What is still being computed on the device: whether the readings contradict a split of one loss.

        Raises:
            OtherSplitError: they do.
        """
        mismatch = self.compare()
        return None if mismatch is None else AsyncReading(mismatch)

    def compare(self) -> Tensor | None:
        """Return whether the readings contradict a split of one loss, where that is computed on a device.

        Raises:
            OtherSplitError: they do, as the host knows.
        """
        for one, other in self._pairs_that_must_agree():
            self._refuse(differ(one, other), _SEVERAL)
        if not self._doubts:
            return None
        return torch.stack(self._doubts).any()

    def _pairs_that_must_agree(self) -> Iterator[tuple[Number, Number]]:
        readings = [reading for reading in self.readings if not reading.is_nothing]
        for reading in readings[1:]:
            yield from zip(readings[0].factors, reading.factors, strict=True)
        divisors = [reading.divisor for reading in readings if reading.divisor is not None]
        for others in zip(*[reading.others for reading in readings], strict=True):
            # Two normalizers are proportional if each micro-batch has the same share of both.
            total, others_total = add_counts(divisors), add_counts(others)
            for divisor, other in zip(divisors, others, strict=True):
                yield other * total, divisor * others_total

    @property
    def _divisors(self) -> list[Number]:
        return [reading.divisor for reading in self.readings if reading.divisor is not None]

    def loss(self) -> Tensor:
        """Return the loss of the step, detached; this rank's share of it, where the total is that of all ranks."""
        if self.readings and self._counts_nothing():
            return self.losses[-1]
        if self.known is not None:
            return self.known.select(self.held).add_up(self.losses)
        total = self.total if self._settled is None else self._settled
        return MicroBatchWeights(self._divisors, total).add_up(self.losses)


def refuse_mismatch(*, is_shared: bool) -> None:
    """Refuse readings that did not agree, after the last backward.

    Args:
        is_shared: whether that backward has passed the gradients to other ranks.

    Raises:
        OtherSplitError: the readings did not agree.
        CannotSplitError: nor can this rank alone run the step again.
    """
    if is_shared:
        raise CannotSplitError(f"{_SEVERAL}, and other ranks already have this rank's gradients")
    raise OtherSplitError(_SEVERAL)


def _estimate_total(count: Number, parts: int) -> Number:
    """Estimate the total, so that nothing overflows in float16 before the real one is known."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, count * parts, 1.0)
    if not count > 0:
        return 1.0
    return count * parts


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


class MicroBatchWeights:
    """The weights ``count / total`` of the micro-batches of a step.

    On a GPU each operation on a scalar is a launch, as expensive for the host as a large one. So the divisions are done
    once for all micro-batches, and each one costs three launches: two in the forward, one in the backward.

    Args:
        counts: the count of each micro-batch, a number or a 0-dimensional tensor.
        total: the divisor of the counts.

    Example:
        >>> weights = MicroBatchWeights([1, 3], 4)
        >>> weights.scale_loss(torch.tensor(2.0), part=1)
        tensor(1.5000)
        >>> weights.add_up([torch.tensor(8.0), torch.tensor(4.0)])
        tensor(5.)
    """

    def __init__(self, counts: Sequence[Number], total: Number) -> None:
        self.counts, self.total = list(counts), total
        self._numbers: list[Any] | None = None
        # Python numbers above 0 need neither tensors nor a `where`.
        if all(not isinstance(x, Tensor) and x > 0 for x in (*counts, total)):
            self._numbers = [count / total for count in counts]
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def scale_loss(self, loss: Tensor, part: int) -> Tensor:
        """Return ``loss · count / total``, or exactly zero for a count of 0, where the mean loss may be NaN."""
        if self._numbers is not None:
            return loss.to(_dtype_of(loss)) * self._numbers[part]
        weights, counted = self._on(loss.device, _dtype_of(loss))
        return _ScaleLoss.apply(loss, weights[part], counted[part])  # pyright: ignore[reportReturnType]

    @classmethod
    def of_row(cls, row: Tensor) -> "MicroBatchWeights":
        """Return the weights of a single micro-batch by its row in such a table, which may be filled later."""
        weights = cls([row[1]], row[1])
        weights._tensors[row.device, torch.float32] = row[:1], row[1:] > 0
        return weights

    def table_on(self, device: torch.device) -> Tensor:
        """Return the weight and the count of each micro-batch in float32, of shape (micro-batches, 2)."""
        if any(isinstance(number, Tensor) for number in (*self.counts, self.total)):
            counts = torch.stack([_as_tensor(count, device) for count in self.counts])
            return torch.stack([self._on(device, torch.float32)[0], counts.float()], 1)
        # A count of 0 has the weight 0, as in `_on`.
        rows = [(count / self.total * (count > 0), count) for count in self.counts]
        # Pinned: otherwise the copy would wait for the device.
        table = torch.tensor(rows, dtype=torch.float32, pin_memory=device.type == "cuda")
        return table.to(device, non_blocking=True)

    def add_up(self, values: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum of one value per micro-batch."""
        values = list(map(Tensor.detach, values))
        if self._numbers is not None:
            # Not sum(), which starts with a 0: one addition less.
            return functools.reduce(torch.add, map(self.scale_loss, values, itertools.count()))
        stacked = torch.stack(values)
        weights, counted = self._on(stacked.device, _dtype_of(stacked))
        return torch.where(counted, stacked * weights, 0.0).sum()

    def select(self, parts: Sequence[int]) -> "MicroBatchWeights":
        """Return the weights of these micro-batches alone, leaving the others out of the total."""
        if len(parts) == len(self.counts):
            return self
        others = [count for part, count in enumerate(self.counts) if part not in parts]
        return MicroBatchWeights([self.counts[part] for part in parts], self.total - add_counts(others))

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weights as one tensor, and which micro-batches have a count above 0."""
        if (device, dtype) not in self._tensors:
            counts = torch.stack([_as_tensor(count, device) for count in self.counts]).to(dtype)
            total = _as_tensor(self.total, device).to(dtype)
            total = torch.where(total > 0, total, 1.0)  # avoids 0 / 0 without changing totals below 1
            counted = counts > 0
            self._tensors[device, dtype] = torch.where(counted, counts / total, 0.0), counted
        return self._tensors[device, dtype]


class _ScaleLoss(torch.autograd.Function):
    """``where(counted, loss · weight, 0)``, whose gradient is the weight: composed, it would take five launches."""

    @staticmethod
    def forward(ctx: object, loss: Tensor, weight: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = loss.dtype
        return torch.where(counted, loss * weight, 0.0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        # The weight is 0 where the count is 0.
        return (gradient * weight).to(ctx.dtype), None, None


def add_counts(counts: Sequence[Number]) -> Number:
    """Return the sum of the counts, in two launches for any number of them."""
    if counts and all(map(torch.is_tensor, counts)):
        return torch.stack(list(counts)).sum()  # pyright: ignore[reportArgumentType]
    return sum(counts)


def _dtype_of(loss: Tensor) -> torch.dtype:
    """Return at least float32, since a weight such as 1/3 keeps only three digits in bfloat16."""
    return torch.promote_types(loss.dtype, torch.float32)


def _as_tensor(number: Number, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device)
    # float64 is for losses of that dtype; not all accelerators have it.
    return torch.full((), number, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
