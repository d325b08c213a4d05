"""Helpers shared by losses that compute the logits of a few tokens at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

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
    if not torch.amp.is_autocast_available(device.type):  # meta
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def logits_into(buffer: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``hidden @ weight.T + bias`` in the first rows of a buffer that all chunks share.

    On a CPU, allocating new memory for each chunk takes a third of the product's time."""
    logits = buffer[: len(hidden)]  # out= works without gradients only, as in custom functions
    if bias is None:
        return torch.mm(hidden, weight.T, out=logits)
    return torch.addmm(bias, hidden, weight.T, out=logits)


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

    def add(self, part: slice, d_logits: Tensor, hidden: Tensor, weight: Tensor, share: Tensor | None = None) -> None:
        """Add a chunk's contribution; ``share`` is a factor per token."""
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
        elif d_logits.is_cuda:  # low precision in, float32 out; CPUs have no out_dtype
            self.weight += torch.mm(d_logits.T, hidden, out_dtype=self.weight.dtype)
        elif d_logits.dtype is torch.bfloat16 and not self.rounded:
            self._product = torch.mm(d_logits.T, hidden, out=self._product)
            self.weight += self._product
        else:  # including float16, whose range a sum over a chunk can exceed
            with _products_in_bfloat16() if d_logits.dtype is torch.bfloat16 else nullcontext():
                self.weight.addmm_(d_logits.T.to(self.weight.dtype), hidden.to(self.weight.dtype))

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


def times(gradient: Tensor | None, share: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Return the product, rounded once to the given dtype."""
    if gradient is None:
        return None
    return torch.mul(gradient, share, out=torch.empty_like(gradient, dtype=dtype))
