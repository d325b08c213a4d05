"""Which checkpoint all ranks load: the one asked for, or, if that is corrupt, the newest that is whole."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fasttrain._checkpoint_folder import CorruptCheckpoint, whole_or_newest


def choose_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Rank zero verifies ``path`` and tells the others; a corrupt one is passed over for its newest whole neighbour.

    Args:
        path: a folder or a file; rank zero's counts.

    Returns:
        What to load, the same on all ranks.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpoint: and none of its neighbours is whole.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> import torch
        >>> torch.save({}, folder / "one.ckpt")
        >>> choose_checkpoint(folder / "one.ckpt").name
        'one.ckpt'
    """
    answer: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer = [whole_or_newest(path)]
        except (CorruptCheckpoint, OSError) as error:
            answer = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
