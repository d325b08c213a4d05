"""Floor: files that are either whole or not there."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: str | os.PathLike[str], data: bytes | str | Callable[[BinaryIO], object]) -> Path:
    """Write ``data`` so that a reader, or a crash, sees the old file or the new one and nothing between.

    The bytes go to a temporary file in the *target's* folder (a rename across file systems is a copy, and a copy
    can be cut short), are synced, and take the target's name in one step; then the folder is synced.

    Args:
        path: the target; its folder is made if it is missing.
        data: bytes; text, which is encoded as UTF-8; or a function that writes to the file it is given.

    Returns:
        The path written.

    Raises:
        OSError: nothing was written; an existing file is as it was.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> write_atomic(folder / "a.json", "{}").read_text()
        '{}'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.parent / f".tmp-{target.name}-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less what the user's umask takes away
    try:
        with os.fdopen(descriptor, "wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(name, target.stat().st_mode & 0o777)
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return target
