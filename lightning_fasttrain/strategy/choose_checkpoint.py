"""Which checkpoint all ranks load: the one asked for, or, if that is corrupt, an older one of the same run."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fasttrain.core.distributed import rank_here
from lightning_fasttrain.core.files.newest_checkpoint import whole_or_older


def choose_checkpoint(path: str | os.PathLike[str], *, substitute: bool) -> Path:
    """Rank zero verifies ``path`` and tells the others.

    Args:
        path: a folder or a file; rank zero's counts.
        substitute: whether an older whole one of the same run may be taken for a corrupt one.

    Returns:
        What to load, the same on all ranks.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpoint: it is, and there is no such other.
        ValueError: it is an address rather than a path.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> import torch
        >>> torch.save({}, folder / "one.ckpt")
        >>> choose_checkpoint(folder / "one.ckpt", substitute=False).name
        'one.ckpt'
    """
    answer: list[Any] = [None]
    if rank_here() == 0:
        try:
            # One rank reads all of it for the checksums: a common disk would be read as often as there are ranks.
            answer = [whole_or_older(path, substitute=substitute)]
        except (ValueError, OSError) as error:
            # Sent instead of raised, or the other ranks would wait for the broadcast.
            answer = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
