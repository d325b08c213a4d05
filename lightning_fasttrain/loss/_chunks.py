"""What losses share that make the logits of a few tokens at a time."""

from typing import Any

import torch
from torch import Tensor


def chunk_size(hidden: Tensor, weight: Tensor) -> int:
    """So many tokens that their logits take about the room of all hidden states; at least 128, to keep kernels busy."""
    tokens, classes = max(1, hidden.shape[0]), weight.shape[0]
    return min(tokens, max(128, tokens * hidden.shape[1] // classes))


def at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class GradientSums:
    """Gradients, added up chunk by chunk; in float32, which is what one large matrix product does inside."""

    def __init__(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, needs: Any) -> None:
        dtype = at_least_float32(hidden)
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needs[1] and weight is not None else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if needs[2] and bias is not None else None

    def add(self, part: slice, d_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.bias is not None:
            self.bias += d_logits.sum(dim=0)
        d_logits = d_logits.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[part] = d_logits @ weight
        if self.weight is None:
            return
        if d_logits.is_cuda and d_logits.dtype != self.weight.dtype:  # low precision in, float32 out
            self.weight += torch.mm(d_logits.T, hidden, out_dtype=self.weight.dtype)
        else:
            self.weight.addmm_(d_logits.T.to(self.weight.dtype), hidden.to(self.weight.dtype))


def times(gradient: Tensor | None, share: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """The product, rounded once, to the dtype of what it is the gradient of."""
    if gradient is None:
        return None
    return torch.mul(gradient, share, out=torch.empty_like(gradient, dtype=dtype))
