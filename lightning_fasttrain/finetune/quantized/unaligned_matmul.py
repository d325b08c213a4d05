"""Matrix products with 4-bit weights on the CPU, for rows that are not aligned with quantisation blocks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward


def dequantize_flat(packed: Tensor, state: object, dtype: torch.dtype) -> Tensor:
    """Dequantise a weight as if it were one long row.

    Blocks of 64 values extend over the end of a row. The AVX-512 kernel of bitsandbytes assumes that each row begins
    with a block, and reads wrong constants if the row length is not a multiple of 64; for odd lengths it compiles a
    slow kernel. With one row, the result is correct and fast.
    """
    ops, constants = torch.ops.bitsandbytes, state.absmax
    if state.nested:
        nested = state.state2
        constants = ops.dequantize_blockwise(constants, nested.absmax, nested.code, nested.blocksize, torch.float32)
        # The offset is their mean, which was subtracted before they were quantised.
        constants = constants + state.offset
    elements = state.shape.numel()
    row = ops.dequantize_4bit(packed, constants, state.blocksize, state.quant_type, [1, elements + elements % 2], dtype)
    return row.flatten()[:elements].view(state.shape)


class FlatForward(WrappedForward):
    """Wrapper of the forward of a ``Linear4bit`` that replaces it on the CPU."""

    module: Any

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self.inner(x)
        inputs = x.to(self.module.compute_dtype or x.dtype)
        bias = None if self.module.bias is None else self.module.bias.to(inputs.dtype)
        return _Product.apply(inputs, self.module.weight, self.module.quant_state, bias).to(x.dtype)


class _Product(torch.autograd.Function):
    """Compute x·Wᵀ + b, saving neither ``x`` nor the dequantised weight for the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, packed: Tensor, state: object, bias: Tensor | None) -> Tensor:
        # Not by ``save_for_backward``: hooks that offload saved tensors would move the frozen weight as well.
        ctx.packed, ctx.state = packed, state
        with torch.autocast("cpu", enabled=False):
            product = F.linear(x, dequantize_flat(packed, state, x.dtype), bias)
        # ``F.linear`` returns a view of rows, which the model could not write into.
        return torch.ops.aten._unsafe_view(product, product.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ dequantize_flat(ctx.packed, ctx.state, gradient.dtype), None, None, None
