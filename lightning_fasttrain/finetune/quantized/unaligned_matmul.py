"""Products with 4-bit weights on the CPU, for layers whose rows do not begin with a block."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward


def dequantize_flat(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The weight, from its numbers as one long row.

    Blocks of 64 numbers go on over the end of a row. bitsandbytes' kernel for AVX-512 takes a row to begin with a
    block of its own, and reads the wrong constants where 64 does not divide the row's length; where the length is odd,
    it compiles a slow one. One row is right and fast.
    """
    ops, constants = torch.ops.bitsandbytes, state.absmax
    if state.nested:
        nested = state.state2
        constants = ops.dequantize_blockwise(constants, nested.absmax, nested.code, nested.blocksize, torch.float32)
        constants = constants + state.offset  # their mean, which was taken off before they were quantised
    numbers = state.shape.numel()
    row = ops.dequantize_4bit(packed, constants, state.blocksize, state.quant_type, [1, numbers + numbers % 2], dtype)
    return row.flatten()[:numbers].view(state.shape)


class FlatForward(WrappedForward):
    """Replaces a ``Linear4bit``'s forward, on the CPU only."""

    module: Any

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self.inner(x)
        inputs = x.to(self.module.compute_dtype or x.dtype)
        bias = None if self.module.bias is None else self.module.bias.to(inputs.dtype)
        return _Product.apply(inputs, self.module.weight, self.module.quant_state, bias).to(x.dtype)


class _Product(torch.autograd.Function):
    """x·Wᵀ + b, which keeps neither ``x`` nor the dequantised weight for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor:
        # Not by ``save_for_backward``: hooks that move what is saved would move the frozen weight as well.
        ctx.packed, ctx.state = packed, state
        with torch.autocast("cpu", enabled=False):
            return F.linear(x, dequantize_flat(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ dequantize_flat(ctx.packed, ctx.state, gradient.dtype), None, None, None
