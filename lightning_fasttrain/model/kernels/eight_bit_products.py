"""A linear layer whose three matrix products, in forward and backward, use 8-bit values."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lightning_fasttrain.core.modules.recomputation import refuse_second_derivative


@dataclass(frozen=True)
class Format:
    """An 8-bit format, and the requirements of the tensor cores that multiply it.

    Args:
        dtype: dtype of the rounded values.
        top: maximum to which a row is scaled.
        multiple: both sizes of a layer must be multiples of it.
        capability: minimum CUDA compute capability with such tensor cores.
        min_features: inputs and outputs from which on the product is known to save more than rounding costs.
    """

    dtype: torch.dtype
    top: float
    multiple: int
    capability: tuple[int, int]
    min_features: int


# float8: a compiled step took 1.13 times as long as in bf16 at 1,600 features, and 0.85 times at 4,096
# (examples/results/h100 and h200).
FORMATS = {
    "float8": Format(torch.float8_e4m3fn, 448.0, 16, (8, 9), 4096),
    "int8": Format(torch.int8, 127.0, 8, (7, 5), 1024),
}
_FEWEST_ROWS = 17  # minimum rows of the first factor in CUDA's int8 product
# Values in a row: 127² times as many stay below 2³¹, the limit of an int32 sum.
_LONGEST = 2**17


def round_rows(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Scale each row so that its maximum is the format's maximum, and round: ``matrix ≈ rounded · scale``.

    Non-finite values make their row's scale non-finite, and so the products: a loss scaler still sees them.

    Args:
        matrix: [m, n], of any floating-point dtype.
        kind: ``"float8"`` or ``"int8"``.

    Returns:
        The rounded values [m, n], row-major, and scales [m, 1] in float32.

    Example:
        >>> rounded, scale = round_rows(torch.tensor([[1.27, -0.5], [0.0, 0.0]]), "int8")
        >>> rounded.tolist(), round(scale[0].item(), 4)
        ([[127, -50], [0, 0]], 0.01)
    """
    form = FORMATS[kind]
    largest = matrix.abs().amax(1, keepdim=True).float()
    # A row of zeros gets a nonzero scale, to avoid a division by zero.
    scale = (largest / form.top).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = matrix / scale
    if not form.dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.to(form.dtype).contiguous(), scale


def multiply_rows(first: Tensor, second: Tensor, kind: str) -> Tensor:
    """Compute first · secondᵀ with both factors rounded row by row to 8 bits, accumulating in int32 or float32.

    Args:
        first: [m, n].
        second: [k, n]; k a multiple of the format's ``multiple``.
        kind: ``"float8"`` or ``"int8"``.

    Returns:
        [m, k] in float32.
    """
    length = first.shape[1]
    if length > _LONGEST:
        start = multiply_rows(first[:, :_LONGEST], second[:, :_LONGEST], kind)
        return start + multiply_rows(first[:, _LONGEST:], second[:, _LONGEST:], kind)
    if length % 16:  # tokens, in the product for the weight's gradient; zeros add nothing
        first, second = F.pad(first, (0, -length % 16)), F.pad(second, (0, -length % 16))
    left, left_scale = round_rows(first, kind)
    right, right_scale = round_rows(second, kind)
    if kind == "int8":
        missing = max(0, _FEWEST_ROWS - len(left))
        if missing:
            left = F.pad(left, (0, 0, 0, missing))
        # ``right`` is row-major, so ``right.t()`` is column-major, as tensor cores require for the second factor.
        product = torch._int_mm(left, right.t())[: len(first)]
    else:
        # With one scale for all, sums are accumulated and kept in float32 on all supported devices; torch's product
        # with a scale per row is slow with exact sums, and returns bfloat16 on some of them.
        one = torch.ones((), dtype=torch.float32, device=first.device)
        # Autocast would change the CPU's emulation.
        with torch.autocast(first.device.type, enabled=False):
            product = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
    return product * left_scale * right_scale.t()


class _Products(torch.autograd.Function):
    """input · weightᵀ and both gradients of it, each a product of rows rounded along the summed dimension."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.kind = kind
        return multiply_rows(input, weight, kind).to(input.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        way_out = "Remove LowPrecisionProducts for this"
        refuse_second_derivative("a product in 8 bits", way_out)  # rounding has no derivative
        input, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            # [m, k] · [k, n]; transposed, as the second factor has rows along the summed dimension.
            of_input = multiply_rows(gradient, weight.t(), ctx.kind).to(input.dtype)
        if ctx.needs_input_grad[1]:
            # [k, m] · [m, n]: summed over tokens.
            of_weight = multiply_rows(gradient.t(), input.t(), ctx.kind).to(weight.dtype)
        return of_input, of_weight, None


def linear_in_8_bits(input: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Compute ``F.linear`` with its products, also those of its backward, in 8 bits.

    Under autocast the input is cast as for ``F.linear``, so that no more memory is kept for the backward; the weight is
    rounded directly, and its gradient has its dtype.

    Args:
        input: [..., n].
        weight: [k, n]; both sizes multiples of the format's ``multiple``.
        bias: [k] or None.
        kind: ``"float8"`` or ``"int8"``.

    Returns:
        [..., k] in the dtype of ``F.linear``.

    Example:
        >>> input, weight = torch.randn(3, 32), torch.randn(16, 32)
        >>> difference = linear_in_8_bits(input, weight, None, "int8") - F.linear(input, weight)
        >>> bool(difference.norm() < 0.02 * F.linear(input, weight).norm())
        True

    Source:
        Rows scaled for each product as in torchao's float8 recipe "rowwise" and its int8 mixed-precision training,
        https://github.com/pytorch/ao; gradients are e4m3 too, with 3 bits of mantissa, since rows have scales.
    """
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    rows = input.reshape(-1, input.shape[-1])
    product = _Products.apply(rows, weight, kind).view(*input.shape[:-1], len(weight))
    return product if bias is None else product + bias.to(product.dtype)
