"""Choice of the checkpoint that all ranks load: the given one or, if it is corrupt, an older one of the same run."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fasttrain.core.distributed import rank_here
from lightning_fasttrain.core.files.newest_checkpoint import whole_or_older


def choose_checkpoint(path: str | os.PathLike[str], *, substitute: bool) -> Path:
    """Verify ``path`` on rank zero and return the path to load on all ranks; a collective.

    Args:
        path: a folder or a file; rank zero's value is used.
        substitute: whether an older intact checkpoint of the same run may replace a corrupt one.

    Returns:
        The path to load, identical on all ranks.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        CorruptCheckpoint: the checkpoint is corrupt, and there is no intact older one.
        ValueError: ``path`` is a URL instead of a local path.

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
            # One rank alone reads the files for their checksums, so that a shared disk is read once.
            answer = [whole_or_older(path, substitute=substitute)]
        except (ValueError, OSError) as error:
            # Broadcast instead of raised, since the other ranks wait for the broadcast.
            answer = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
