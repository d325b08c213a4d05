"""Atomic writing of files, also in a background thread, and locks that show whether a process is still writing."""

import copy
import fcntl
import io
import os
import re
import secrets
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_fasttrain.core.messages import explain, warn, write_to_stderr

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
    target.parent.mkdir(parents=True, exist_ok=True)
    name = temporary_path(target.parent, target.name)
    # The user's umask is subtracted from this mode.
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with _Target(io.FileIO(descriptor, "wb")) as file:
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
            os.replace(name, target)
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
    """Sync ``folder``, so that the names in it outlast a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock the file or folder ``path``, waiting for other holders; the lock ends with the process in any case."""
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
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held; or a file system without locks
        return True
    return False


Write = Callable[..., None]


class BackgroundSave:
    """Copy states to host memory, and write them in a thread while training continues.

    At most one copy is held: the next save waits until this one is written. An error is raised by the next
    :meth:`start` or :meth:`wait`. At exit, the program waits for its last checkpoint.

    Args:
        write: function that is called with the copies, in a thread. If it calls collectives, then on a process group of
            its own, so that those of training are not disturbed.

    Example:
        >>> import torch
        >>> written = []
        >>> save = BackgroundSave(lambda *states: written.append(states))
        >>> weight = torch.ones(2)
        >>> save.start({"weight": weight})
        >>> _ = weight.zero_()
        >>> save.wait()
        >>> written[0][0]["weight"]
        tensor([1., 1.])

    Source:
        Ours; ``torch.distributed.checkpoint.async_save`` does not define how the folder is published.
    """

    def __init__(self, write: Write) -> None:
        self.write = write
        self._thread: threading.Thread | None = None
        self._left_alone: threading.Thread | None = None
        self._error: BaseException | None = None
        self._at_exit: Finalize | None = None
        self._after: list[Callable[[], None]] = []

    @property
    def in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, *states: object) -> None:
        """Wait for the previous save, copy ``states``, and begin to write them."""
        self.wait()
        # The saves share one process group, so two at once would mix their collectives.
        if self._left_alone is not None:
            self._left_alone.join()
            self._left_alone = self._error = None
        copies = list(map(to_host, states))

        def run() -> None:
            try:
                self.write(*copies)
            except BaseException as error:  # raised later, in the training thread
                self._error = error

        # A daemon: when the process must end, an incomplete folder stays unpublished.
        self._thread = threading.Thread(target=run, name="fasttrain-checkpoint", daemon=True)
        # A daemon thread ends with the interpreter, so the exit waits for it here; unlike atexit, also in processes
        # that multiprocessing starts.
        self._at_exit = Finalize(None, self._finish, exitpriority=10)
        self._thread.start()

    def do_afterwards(self, action: Callable[[], None]) -> None:
        """Run ``action`` once the save in flight has succeeded; immediately if there is none."""
        if self._thread is None:
            action()
        else:
            self._after.append(action)

    def wait(self) -> None:
        """Wait until no save is in flight, and raise the error of the last save, if any."""
        self._join(None)
        error, self._error = self._error, None
        after, self._after = self._after, []
        if error is not None:
            raise error
        for action in after:
            action()

    def give_up(self, seconds: float | None) -> None:
        """Wait up to ``seconds``, warn if the last checkpoint is incomplete, and abandon it; for a run that fails.

        Args:
            seconds: None waits until the checkpoint is written.
        """
        self._join(seconds)
        # The run fails with another error, so this one is only reported.
        if self._thread is not None or self._error is not None:
            warn(f"the last checkpoint was not completed ({self._error or 'still being written'}): use the one before.")
        self._left_alone, self._thread = self._thread, None
        self._error, self._after = None, []

    def _finish(self) -> None:
        """Wait at exit, and write an error to stderr, since raising has no effect there."""
        try:
            self.wait()
        except BaseException as error:
            write_to_stderr(f"the last checkpoint was not completed:\n{''.join(traceback.format_exception(error))}")

    def _join(self, seconds: float | None) -> None:
        # This call waits, so the exit handler need not.
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None


def to_host(state: object, copies: dict[int, Any] | None = None) -> Any:
    """Copy nested dicts, lists, tuples and sets to host memory; no tensor shares memory with the original.

    Tensors that share memory with each other, such as tied weights, do so in the copy.

    Args:
        state: what to copy.
        copies: storages that are copied already, by the address of the original.
    """
    copies = {} if copies is None else copies
    if isinstance(state, Tensor):
        return _copy_tensor(state.detach(), copies)
    if isinstance(state, dict):
        copied = copy.copy(state)  # which keeps the class, and the metadata of a state_dict
        for key, value in state.items():
            copied[key] = to_host(value, copies)
        return copied
    # A named tuple's constructor takes separate arguments.
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(to_host(value, copies) for value in state))
    if isinstance(state, list | tuple):
        return type(state)(to_host(value, copies) for value in state)
    return copy.copy(state) if isinstance(state, set) else state


def _copy_tensor(tensor: Tensor, copies: dict[int, Any]) -> Tensor:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
    if not plain:
        # copy=True: training continues to change tensors that are on the CPU already.
        return tensor.to("cpu", copy=True)
    storage = tensor.untyped_storage()
    if storage._cdata not in copies:
        copies[storage._cdata] = storage.clone() if tensor.device.type == "cpu" else storage.cpu()
    copied = torch.empty(0, dtype=tensor.dtype)
    return copied.set_(copies[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
