"""How many processes train together, which of them this is, and what each of them holds."""

from typing import Any

import torch.distributed as dist
from torch import nn


def rank_count() -> int:
    """How many there are; 1 without ``torch.distributed``.

    Example:
        >>> rank_count(), rank_here()
        (1, 0)
    """
    return dist.get_world_size() if _is_launched() else 1


def rank_here() -> int:
    """The number of this one; 0 without ``torch.distributed``."""
    return dist.get_rank() if _is_launched() else 0


def from_all_ranks(mine: list[Any]) -> list[Any]:
    """The entries of all ranks' lists, so that all decide alike."""
    if rank_count() == 1:
        return mine
    gathered: list[Any] = [None] * rank_count()
    dist.all_gather_object(gathered, mine)
    return [entry for some in gathered for entry in some]


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are in pieces, so that their gradients cannot be taken beside the training's own."""
    # `ds_id` is of DeepSpeed's stage 3, `device_mesh` of DTensors.
    return any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())


def _is_launched() -> bool:
    return dist.is_available() and dist.is_initialized()
