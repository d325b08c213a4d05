"""Assume values for ``.item()`` and data-dependent shapes when tracing with fake tensors."""

from typing import Any

import torch
from torch import Tensor, ops
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 10_000  # values; a loop that waits for another value would never end


class AssumedNumbers(TorchDispatchMode):
    """Returns 1 for every value read from a tensor, where torch would raise an error. Enter it inside a fake mode.

    Args:
        truth: the value returned for booleans.

    Attributes:
        assumed: number of assumed values.
    """

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.truth = truth
        self.assumed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operation's result with assumed values."""
        if func is ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        if func is ops.aten.masked_select.default:
            self.assumed += 1
            # Assumes that all elements are selected, the upper bound.
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not ops.aten._local_scalar_dense.default or self.assumed >= MOST:
                raise
        self.assumed += 1
        dtype = args[0].dtype
        if dtype is torch.bool:
            return self.truth
        return 1.0 if dtype.is_floating_point else 1


def _grouped_product(first: Tensor, second: Tensor, ends: Tensor | None = None, *_: Any, **settings: Any) -> Tensor:
    """Multiply groups of rows, as for mixtures of experts. Fake tensors support it only in bfloat16."""
    ends = settings.get("offs", ends)
    groups: tuple[int, ...] = ()
    if first.ndim == second.ndim and ends is not None:
        groups = (len(ends),) if first.ndim == 2 else (len(first),)
    rows, columns = first.shape[-2], second.shape[-1]
    return first.new_empty((*groups, rows, columns))
