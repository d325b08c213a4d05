"""Compiled code, saved to a file by one process and loaded by the next."""

import os
import stat
from pathlib import Path

import torch

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._messages import explain


def save_compile_cache(path: str | os.PathLike[str]) -> int:
    """Write what this process has compiled to one file, whole or not at all; returns its bytes (0: nothing to save).

    Example:
        >>> save_compile_cache(getfixture("tmp_path") / "cache.bin") >= 0
        True
    """
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return 0
    write_atomic(path, artifacts[0])
    return len(artifacts[0])


def load_compile_cache(path: str | os.PathLike[str]) -> bool:
    """Load a file of :func:`save_compile_cache`, so that this process compiles less; False if there is none.

    The file holds compiled code, which will be executed. So it is taken only if it belongs to the user who runs
    this process and nobody else may write to it.

    Raises:
        PermissionError: it belongs to, or can be written by, somebody else.

    Example:
        >>> load_compile_cache(getfixture("tmp_path") / "none.bin")
        False
    """
    file = Path(path)
    if not file.exists():
        return False
    status = file.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(
            explain(
                f"compile cache {file} belongs to or can be written by other users",
                "it holds code that would be executed",
                f"If you made it: chown it to yourself and chmod go-w {file}",
            )
        )
    return torch.compiler.load_cache_artifacts(file.read_bytes()) is not None
