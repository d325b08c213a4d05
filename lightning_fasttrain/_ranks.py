"""Floor: how many processes train together, and which of them this is."""

import torch.distributed as dist


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


def _is_launched() -> bool:
    return dist.is_available() and dist.is_initialized()
