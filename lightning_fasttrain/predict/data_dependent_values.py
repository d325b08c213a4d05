"""Answers that a run on tensors without values needs: numbers are assumed, and shapes that depend on them."""

from typing import Any

import torch
from torch import Tensor, ops
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 10_000  # numbers; a loop that waits for another one would never end


class AssumedNumbers(TorchDispatchMode):
    """Gives 1 for every number that is read out of a tensor, where torch would give up. Enter it inside a fake mode.

    Args:
        truth: what is given for a truth value.

    Attributes:
        assumed: how many numbers were given.
    """

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.truth = truth
        self.assumed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result."""
        if func is ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        if func is ops.aten.masked_select.default:
            self.assumed += 1
            # As if all were selected, which is the most that there can be.
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
    """Products of groups of rows, as the experts of a mixture make them. Fake tensors know it for bfloat16 alone."""
    ends = settings.get("offs", ends)
    groups: tuple[int, ...] = ()
    if first.ndim == second.ndim and ends is not None:
        groups = (len(ends),) if first.ndim == 2 else (len(first),)
    rows, columns = first.shape[-2], second.shape[-1]
    return first.new_empty((*groups, rows, columns))
