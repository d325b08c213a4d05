"""Weight the micro-batches of one step by the normalizers that are read from their losses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.data.normalizer.count_targets import weights_of
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.micro_batch_weights import (
    MicroBatchWeights,
    Number,
    add_counts,
    scale_loss,
)
from lightning_fasttrain.data.normalizer.split_rule import (
    ROUNDING,
    LossSplit,
    OtherSplitError,
    Reading,
    as_host_bool,
    is_near,
    on_host,
)

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
    """

    def __init__(
        self,
        split: LossSplit,
        parts: Sequence[Any],
        reference: Number | None = None,
        over_ranks: Callable[[Number], Number] | None = None,
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
        self.known: MicroBatchWeights | None = None
        if split.is_sum:
            one: Number = 1 if reference is None else reference
            self.known = MicroBatchWeights([1] * self.parts, one)
        elif split.count is not None:
            counts, total = weights_of(split.count, parts)
            if over_ranks is not None:
                # Either all ranks get here or none, since they found the same rule.
                total = over_ranks(total)
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
        return part == self.parts - 1 and not self._has_others and _is_zero(on_host(self.total))

    def _refuse_other(self, reading: Reading, part: int) -> None:
        assert self.known is not None
        counted = self.known.counts[part]
        if reading.count is None or (isinstance(counted, Tensor) and counted.device.type != "cpu"):
            return  # values on a device are compared in `disagreement`
        if isinstance(reading.count, float | int):
            expected = float(counted) * self.split.scale
            if abs(reading.count - expected) > ROUNDING * max(abs(expected), abs(reading.count)):
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

    def settle(self) -> Number | None:
        """Return the factor for the gradients so far and for the last loss; None where none is needed."""
        if self.known is not None or self.reference is None:
            return None
        total = self._settled = self.total if self._over_ranks is None else self._over_ranks(self.total)
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
                found.append((one - other).abs() > ROUNDING * torch.maximum(one.abs(), other.abs()))
            elif not is_near(one, other):
                return True
        return as_host_bool(torch.stack(found).any()) if found else False

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

    def loss(self) -> Tensor:
        """Return the loss of the step, detached; this rank's share of it, where the total is that of all ranks."""
        if self.readings and not self._has_others and _is_zero(on_host(self.total)):
            return self.losses[-1]
        if self.known is not None:
            return self.known.select(self.held).add_up(self.losses)
        divisors = [reading.divisor for reading in self.readings if reading.divisor is not None]
        return MicroBatchWeights(divisors, self.total if self._settled is None else self._settled).add_up(self.losses)


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
            raise OtherSplitError(_SEVERAL)
        self._flag = DeferredFlag(disagrees) if isinstance(disagrees, Tensor) else None

    def refuse(self, *, is_shared: bool) -> None:
        """Refuse readings that do not agree, after the last backward.

        Args:
            is_shared: whether that backward has passed the gradients to other ranks.

        Raises:
            OtherSplitError: the readings did not agree.
            CannotSplitError: nor can this rank alone run the step again.
        """
        if self._flag is None or not self._flag.read():
            return
        if is_shared:
            raise CannotSplitError(f"{_SEVERAL}, and other ranks already have this rank's gradients")
        raise OtherSplitError(_SEVERAL)


def _estimate_total(count: Number, parts: int) -> Number:
    """Estimate the total, so that nothing overflows in float16 before the real one is known."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, count * parts, 1.0)
    return count * parts if count > 0 else 1.0


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
