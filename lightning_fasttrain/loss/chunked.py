"""A loss that computes the logits of a few tokens at a time, and its gradients with them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fasttrain.core.device import kernels_of
from lightning_fasttrain.core.modules.recomputation import refuse_second_derivative

# Whole tiles of matrix kernels; beyond 4,096 rows a chunk takes memory and gains hardly any speed.
_STEP, _MOST = 128, 4096
_LOGITS_BYTES = 512 * 2**20


def chunk_size(tokens: int, row_bytes: int, share: int = 8, enough: int = 2048) -> int:
    """Return the number of tokens per chunk of logits: as many as fit in 512 MiB, but only a share of all tokens.

    A ``share``-th of all tokens, or a quarter if that is below ``enough``, the number that outweighs accumulating a
    weight's gradient. In multiples of 128, and at most 4,096, which keep kernels busy.

    Args:
        tokens: the number of all tokens.
        row_bytes: the size of one token's logits.
        share: see above.
        enough: see above.

    Example:
        >>> chunk_size(32_768, 2 * 50_304), chunk_size(32_768, 2 * 128_256), chunk_size(4096, 2 * 128_256)
        (4096, 2048, 1024)
    """
    wanted = min(max(tokens // share, enough), max(tokens // 4, tokens // share))
    room = max(_STEP, _LOGITS_BYTES // row_bytes // _STEP * _STEP)
    # At least 1, since range() does not accept a step of 0.
    return max(1, min(tokens, _MOST, room, -(-wanted // _STEP) * _STEP))


def at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    # The meta device has no autocast to ask for.
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class GradientSums:
    """Sums of gradients over chunks, in float32 like the accumulation inside one large matrix product.

    Args:
        hidden, weight, bias: the tensors that the gradients belong to.
        needs: which of the gradients are needed.
        rounded: whether the sums will finally be rounded to low precision. A CPU's products in low precision are
            rounded as well, like one large product; rounding once is enough.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, needs: Sequence[bool], rounded: bool = True
    ) -> None:
        self.rounded = rounded
        dtype = at_least_float32(hidden)
        # Each row is written by one chunk only, so it needs neither zeros nor a wider dtype.
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needs[1] and weight is not None else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if needs[2] and bias is not None else None
        self._product: Tensor | None = None  # low-precision product of a chunk; the next chunk reuses its memory

    def add(
        self, part: slice, d_logits: Tensor, hidden: Tensor, weight: Tensor | None, share: Tensor | None = None
    ) -> None:
        """Add a chunk's contribution; ``share`` is a factor per token. Without a weight, ``hidden`` are the logits."""
        if weight is None:
            assert self.hidden is not None
            self.hidden[part] = d_logits
            return
        column = None if share is None else share.to(hidden.dtype)[:, None]
        if self.bias is not None:  # uses d_logits before they are rounded below
            self.bias += (d_logits if column is None else d_logits * column).sum(dim=0, dtype=self.bias.dtype)
        d_logits = d_logits.to(hidden.dtype)
        if self.hidden is not None:
            torch.mm(d_logits, weight, out=self.hidden[part])
            if column is not None:
                self.hidden[part] *= column
        if self.weight is None:
            return
        hidden = hidden if column is None else hidden * column  # D values per token, where d_logits have V
        if d_logits.dtype == self.weight.dtype:
            self.weight.addmm_(d_logits.T, hidden)
        elif kernels_of(d_logits) == "cuda":
            self._add_product_in_place(d_logits.T, hidden)
        elif d_logits.dtype is torch.bfloat16 and not self.rounded:
            self._product = torch.mm(d_logits.T, hidden, out=self._product)
            self.weight += self._product
        else:  # including float16, whose range a sum over a chunk can exceed
            with _products_in_bfloat16() if d_logits.dtype is torch.bfloat16 else nullcontext():
                self.weight.addmm_(d_logits.T.to(self.weight.dtype), hidden.to(self.weight.dtype))

    def _add_product_in_place(self, left: Tensor, right: Tensor) -> None:
        """Add a product of low precision to the weight's float32 in one kernel, which CPUs do not have."""
        assert self.weight is not None
        if torch.compiler.is_compiling():  # the compiler's rule for this operator fails in torch 2.11
            self.weight += torch.mm(left, right, out_dtype=self.weight.dtype)
        elif left.is_cuda:
            torch.addmm(self.weight, left, right, out_dtype=self.weight.dtype, out=self.weight)
        else:  # a trace: the kernel allocates nothing
            assert type(left) is not Tensor, "a tensor on the CPU has values"

    def cast_to(self, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Return the sums in the given dtypes."""
        sums = (self.hidden, self.weight, self.bias)
        return [cast(gradient, dtype) for gradient, dtype in zip(sums, dtypes, strict=True)]


@contextmanager
def _products_in_bfloat16() -> Iterator[None]:
    """Compute products of float32 tensors in bfloat16 on capable CPUs: exact for bfloat16 values, and faster."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _times(gradient: Tensor | None, share: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Return the product, rounded once to the given dtype."""
    if gradient is None:
        return None
    return torch.mul(gradient, share, out=torch.empty_like(gradient, dtype=dtype))


def _count_tokens(losses: Tensor, counted: Tensor | None, *_: Tensor | None) -> Tensor:
    return losses.new_full((), len(losses)) if counted is None else counted.sum().to(losses.dtype)


# (tokens of the chunk, factor of the gradient per token or None, whether the gradient is needed)
# → (loss of each token, its gradient by the logits)
OfChunk = Callable[[slice, Tensor | None, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ChunkedLoss:
    """A loss whose logits are computed ``size`` tokens at a time.

    For ``"mean"`` and ``"sum"`` the gradients are computed with the logits, in the forward; for ``"none"`` the logits
    are computed again in the backward.

    Args:
        name: the function that the user called, for messages.
        way_out: what to use instead of it, for messages.
        prepare: (hidden, weight, bias, counted, *others) → the function of a chunk.
        reduction: ``"mean"`` over the counted tokens, ``"sum"`` or ``"none"``.
        size: number of tokens in a chunk.
        low: dtype of the products, if it is not that of the tensors.
        divisor: (losses, counted, *others) → what the mean divides by; by default the number of counted tokens.
    """

    name: str
    way_out: str
    prepare: Callable[..., OfChunk]
    reduction: str
    size: int
    low: torch.dtype | None = None
    divisor: Callable[..., Tensor] = _count_tokens

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, counted: Tensor | None, *others: Tensor | None
    ) -> Tensor:
        """Return the loss; only ``hidden``, ``weight`` and ``bias`` have gradients.

        Args:
            hidden: (T, D), or without ``weight`` the logits themselves, (T, V).
            weight: (V, D).
            bias: (V,).
            counted: (T,), the tokens that count; None for all.
            others: what ``prepare`` needs besides.
        """
        return _Chunked.apply(hidden, weight, bias, counted, self, *others)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        counted: Tensor | None,
        loss: ChunkedLoss,
        *others: Tensor | None,
    ) -> Tensor:
        ctx.loss, ctx.dtypes = loss, (hidden.dtype, dtype_of(weight), dtype_of(bias))
        # Rounded as by F.linear, and only here, so that gradients of float32 weights are not.
        if loss.low is not None:
            hidden, weight, bias = hidden.to(loss.low), cast(weight, loss.low), cast(bias, loss.low)
        # The gradient of existing logits is as large as they are, so it is computed in the backward.
        ctx.again = loss.reduction == "none" or weight is None
        needs = ctx.needs_input_grad[:3]
        sums = None
        if not ctx.again and any(needs):
            sums = GradientSums(hidden, weight, bias, needs, rounded=ctx.dtypes[1] == hidden.dtype)
        losses = torch.empty(len(hidden), dtype=at_least_float32(hidden), device=hidden.device)
        of_chunk = loss.prepare(hidden, weight, bias, counted, *others)
        for start in range(0, len(hidden), loss.size):
            part = slice(start, start + loss.size)
            losses[part], d_logits = of_chunk(part, None, sums is not None)
            if sums is not None:
                sums.add(part, d_logits, hidden[part], weight, None if counted is None else counted[part])
        if counted is not None:
            losses = torch.where(counted, losses, 0.0)
        number = loss.divisor(losses, counted, *others) if loss.reduction == "mean" else losses.new_ones(())
        # The saved gradients are those of the sum, in float32 where they add up over tokens. The mean's factor is
        # applied in the backward, together with a loss scaler's, so that they neither overflow nor vanish in float16.
        # The mean of nothing is NaN, as in torch, and its gradient 0.
        factor = torch.where(number == 0, 1.0, number).reciprocal()
        if ctx.again:
            ctx.save_for_backward(factor, hidden, weight, bias, counted, *others)
        elif sums is not None:
            ctx.save_for_backward(factor, sums.hidden, sums.weight, sums.bias)
        if loss.reduction == "none":
            return losses
        if not torch.compiler.is_compiling():
            # For micro_batching.read_normalizers, which cannot see into this function.
            ctx.normalizer = loss.reduction, number
        return losses.sum() * number.reciprocal()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        loss: ChunkedLoss = ctx.loss
        refuse_second_derivative(loss.name, loss.way_out)
        factor, *saved = ctx.saved_tensors
        share = grad * factor
        without_gradient = [None] * (len(ctx.needs_input_grad) - 3)
        if not ctx.again:
            return *(_times(g, share, dtype) for g, dtype in zip(saved, ctx.dtypes, strict=True)), *without_gradient
        hidden, weight, bias, counted, *others = saved
        share = share.expand(len(hidden))
        if counted is not None:
            share = torch.where(counted, share, 0.0)
        sums = GradientSums(hidden, weight, bias, ctx.needs_input_grad[:3], rounded=ctx.dtypes[1] == hidden.dtype)
        of_chunk = loss.prepare(hidden, weight, bias, counted, *others)
        for start in range(0, len(hidden), loss.size):
            part = slice(start, start + loss.size)
            _, d_logits = of_chunk(part, share[part], True)
            sums.add(part, d_logits, hidden[part], weight)
        return *sums.cast_to(ctx.dtypes), *without_gradient
