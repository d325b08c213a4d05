"""Which checkpoint all ranks load: the one asked for, or, if that is corrupt, the newest that is whole."""

import glob
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fasttrain._checkpoint_folder import CorruptCheckpoint, newest_checkpoint, verify_checkpoint
from lightning_fasttrain._messages import explain, warn


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
            answer = [_choose(Path(path))]
        except (CorruptCheckpoint, OSError) as error:
            answer = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


def _choose(path: Path) -> Path:
    if not path.exists() and any(path.parent.glob(f".*-{glob.escape(path.name)}")):
        newest_checkpoint(path.parent)  # finishes what a killed save has left, which may be this one, complete
    try:
        verify_checkpoint(path)
        return path
    except CorruptCheckpoint as error:
        found = newest_checkpoint(path.parent)
        if found is None:
            raise
        warn(explain(f"{error} Instead", f"{found} is loaded, the newest that is whole", "Check how far it had come"))
        return found
