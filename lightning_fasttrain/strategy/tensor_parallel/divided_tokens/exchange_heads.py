"""Attention over sequences that are divided over ranks: each attends to all tokens, with its share of the heads."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.overrides import TorchFunctionMode

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.tensor_parallel.divisors import common_divisors

_INPUTS = ("query", "key", "value")


class ExchangedAttention(TorchFunctionMode):
    """Context in which ``scaled_dot_product_attention`` attends to the tokens of all ranks of a group.

    Its inputs have all heads and this rank's tokens. Ranks exchange them, so that each has all tokens and its share of
    the heads, attends with any kernel and mask, and exchange the outputs back.

    Args:
        group: the ranks that share the tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        ranks = self.group.size()
        _refuse_shapes(query, key, attn_mask, ranks)
        if key.shape[1] % ranks:
            # Each of them serves several queries' heads, and is copied for each.
            copies = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.chunk(ranks, 1)[self.group.rank()]
        query, key, value = (_to_heads(x, self.group) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        return _to_tokens(mixed, self.group)


class RecordedAttention(TorchFunctionMode):
    """Context that records the queries, keys and values of ``scaled_dot_product_attention``, each (B, H, T, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = {**dict(zip(_INPUTS, args, strict=False)), **(kwargs or {})}
            self.seen += [given[name] for name in _INPUTS]
        return func(*args, **(kwargs or {}))


def _refuse_shapes(query: Tensor, key: Tensor, mask: Tensor | None, ranks: int) -> None:
    option = f"context_parallel={ranks}"
    if query.ndim != 4 or query.shape[2] != key.shape[2]:
        what = f"{option} with queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}"
        why = "expected (B, H, T, d) for the same tokens, as in self-attention"
        raise ValueError(explain(what, why, "Use context_parallel=1"))
    if query.shape[1] % ranks:
        why = f"each rank attends with its share of the {query.shape[1]} heads"
        raise ValueError(explain(option, why, f"Use one of context_parallel={common_divisors([query.shape[1]])}"))
    tokens = query.shape[2] * ranks
    if mask is not None and (mask.shape[-1] not in (1, tokens) or mask.shape[-2:-1] not in ((1,), (tokens,))):
        what = f"{option} with an attention mask of shape {tuple(mask.shape)}"
        why = f"it is not that of all {tokens} tokens: a block that makes its own mask sees a share of them"
        raise ValueError(explain(what, why, "Make the mask outside of blocks, or use context_parallel=1"))


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's tokens for its heads of all tokens: (B, H, T / n, d) → (B, H / n, T, d)."""
    received = _exchange(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's heads of all tokens for all heads of its tokens: (B, H / n, T, d) → (B, H, T / n, d)."""
    received = _exchange(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group)
    return received.movedim(0, 1).flatten(1, 2)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part number i of a tensor (n, ...) to rank i; return those of all ranks. Gradients are sent back."""
    sent = collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)
    return collectives.wait_tensor(sent)
