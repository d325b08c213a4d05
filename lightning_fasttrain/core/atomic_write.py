"""Atomic writing of files, and locks that show whether a process is still writing."""

import io
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lightning_fasttrain.core.messages import explain

if sys.platform != "win32":  # whose locks keep readers out of a file, and which cannot open folders
    import fcntl

# What carries this prefix may be removed, so no user's file may have it.
TEMPORARY = ".fasttrain-tmp-"


def write_atomic(path: str | os.PathLike[str], data: bytes | str | Callable[[BinaryIO], object]) -> Path:
    """Write a file atomically: a reader, also after a crash, sees the old file or the complete new one.

    The bytes go to a temporary file in the *target's* folder (a rename across file systems is a copy, and a copy
    can be cut short), are synced, and take the target's name in one step; then the folder is synced.

    Args:
        path: the target; its folder is made if it is missing.
        data: bytes; text, which is encoded as UTF-8; or a function that writes to the file it is given.

    Returns:
        The path written.

    Raises:
        OSError: nothing was written; an existing file is not changed.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> write_atomic(folder / "a.json", "{}").read_text()
        '{}'
    """
    target = Path(path)
    make_folder(target.parent)
    name = temporary_path(target.parent, target.name)
    with _explained(target.parent):
        # The user's umask is subtracted from this mode.
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with _Target(io.FileIO(descriptor, "wb")) as file:
            if sys.platform != "win32":
                with suppress(OSError):  # not every file system has locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if callable(data):
                file.fill(data)
            else:
                file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
            # A rename brings the new file's mode along, and who could read the old one must be able to read this one.
            if target.exists():
                os.chmod(name, target.stat().st_mode & 0o777)
            if sys.platform != "win32":
                # Before the lock ends with the file, since another process may remove a temporary file without one.
                os.replace(name, target)
        if sys.platform == "win32":
            os.replace(name, target)  # only of a closed file
    except BaseException:
        # On an interrupt too, since nothing else knows the temporary name.
        name.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return target


class _Target(io.BufferedWriter):
    """A file that keeps the error of a failed write, which ``torch.save`` replaces by one of its archive writer's."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise

    def fill(self, write_to: Callable[[BinaryIO], object]) -> None:
        try:
            write_to(self)
        except RuntimeError as error:
            raise self.error or error from error


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, if they are missing.

    Raises:
        OSError: it cannot be created; the message says what to do.

    Example:
        >>> make_folder(Path("/dev/null/checkpoints"))
        Traceback (most recent call last):
        NotADirectoryError: /dev/null/checkpoints: no file can be created there, Not a directory. Use a folder that ...
    """
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"no file can be created there, {error.strerror or error}"
        raised = type(error)(explain(f"{folder}", why, "Use a folder that you may write to"))
        raised.errno = error.errno  # a caller may repeat what failed for a moment
        raise raised from error


def temporary_path(folder: Path, name: str) -> Path:
    """Return a new path in ``folder`` for what will be called ``name``, which no other process uses."""
    return folder / f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"


def is_temporary_file(path: Path) -> bool:
    """Return whether ``path`` is a file at a path of :func:`temporary_path`, by its kind and its complete name."""
    named = re.fullmatch(rf"{re.escape(TEMPORARY)}.+-\d+-[0-9a-f]{{8}}", path.name, re.DOTALL)
    return named is not None and path.is_file() and not path.is_symlink()


def why_unwritable(folder: Path) -> str:
    """Return why no file can be created in ``folder``, which may not exist yet; "" if one can.

    Example:
        >>> why_unwritable(getfixture("tmp_path") / "not" / "made" / "yet")
        ''
    """
    there = next(filter(Path.exists, (folder, *folder.absolute().parents)))  # a file counts too
    probe = temporary_path(there, "probe")
    # Written to, since permissions do not show quotas, read-only mounts and the rules of network file systems.
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        probe.unlink()
    except OSError as error:
        return f"{error.strerror or error} ({there})"
    return ""


def refuse_unwritable(folder: str | os.PathLike[str], what: str) -> None:
    """Refuse, before a run, a folder that the run could not write to.

    Args:
        folder: may not exist yet.
        what: the setting that names it, for the message.

    Raises:
        OSError: no file can be created there.
    """
    reason = why_unwritable(Path(folder))
    if reason:
        raise OSError(explain(what, f"no file can be created there, {reason}", "Use a folder that you may write to"))


def find_existing(path: Path) -> Path:
    """Return ``path`` if it is a folder, otherwise the nearest folder above it."""
    return next(filter(Path.is_dir, (path, *path.absolute().parents)))


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes of the disk that ``path`` is on, or will be on."""
    return shutil.disk_usage(find_existing(path)).free


def sync_folder(folder: Path) -> None:
    """Sync ``folder``, so that the names in it outlast a power failure; Windows does not offer this."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock the file or folder ``path``, waiting for other holders; the lock ends with the process in any case.

    On Windows nothing is locked.
    """
    if sys.platform == "win32":
        yield
        return
    # A folder can be opened in no other way, and a lock needs no more.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_being_written(path: Path) -> bool:
    """Return whether a living process holds ``path`` by :func:`write_atomic` or :func:`lock`; True if unknown."""
    if sys.platform == "win32":
        return path.exists()
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held; or a file system without locks
        return True
    return False
