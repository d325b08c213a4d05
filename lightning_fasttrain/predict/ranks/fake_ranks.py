"""A process group of any size in one process, whose collectives move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_fasttrain.core.messages import explain


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Context in which this process is ``rank`` of ``world``; collectives return at once, and move nothing.

    Args:
        world: number of ranks.
        rank: rank of this process.

    Raises:
        ValueError: ``rank`` is not below ``world``, or this process has joined a process group already.

    Example:
        >>> with fake_ranks(1024, rank=3):
        ...     dist.get_world_size(), dist.get_rank()
        (1024, 3)
        >>> dist.is_initialized()
        False

    Source:
        ``torch.testing._internal.distributed.fake_pg``.
    """
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if rank >= world:
        why = f"ranks are counted from 0, so the last one is {world - 1}"
        raise ValueError(explain(f"rank={rank} of world={world}", why, "Use a rank below world"))
    if dist.is_initialized():
        why = f"this process is one of {dist.get_world_size()} ranks already, and torch has one default process group"
        way_out = "Predict in a process of its own, such as with `fasttrain memory`"
        raise ValueError(explain("a prediction for one rank of many", why, way_out))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
