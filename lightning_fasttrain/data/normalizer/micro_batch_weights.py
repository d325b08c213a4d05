"""Weights of the micro-batches of one step, computed together on the device."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Number = Tensor | float


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
        self.counts, self.total = counts, total
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
