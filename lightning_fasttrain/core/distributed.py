"""Ask for ranks, and exchange values among them."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn


def rank_count() -> int:
    """Return the number of ranks; 1 without ``torch.distributed``.

    Example:
        >>> rank_count(), rank_here()
        (1, 0)
    """
    return dist.get_world_size() if _is_launched() else 1


def rank_here() -> int:
    """Return the rank of this process; 0 without ``torch.distributed``."""
    return dist.get_rank() if _is_launched() else 0


def from_all_ranks(mine: list[Any]) -> list[Any]:
    """Return the entries of the lists of all ranks, so that all ranks decide the same."""
    if rank_count() == 1:
        return mine
    gathered: list[Any] = [None] * rank_count()
    dist.all_gather_object(gathered, mine)
    return [entry for some in gathered for entry in some]


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are sharded, so that no gradients can be computed beside those of the training itself."""
    # `ds_id` is of DeepSpeed's stage 3, `device_mesh` of DTensors.
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())


def _is_launched() -> bool:
    return dist.is_available() and dist.is_initialized()


def sum_over_ranks(counts: list[int], strategy: Strategy | None, world_size: int) -> list[int]:
    """Return the sum of each of the ``counts`` over all ranks.

    A single process returns its own. Several use one small all-reduce, for whose result the host waits, since all must
    continue with the same sums.
    """
    if strategy is None or world_size == 1:
        return counts
    # Exact up to 2^53. float32 ends at 2^24, and a step may hold more tokens than that.
    here = torch.tensor(counts, dtype=torch.float64, device=strategy.root_device)
    total: Tensor = strategy.reduce(here, reduce_op="sum")
    return [int(count) for count in total.tolist()]
