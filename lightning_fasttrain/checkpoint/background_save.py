"""Checkpoints that are copied to host memory and written in the background, one at a time."""

import copy
import threading
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.messages import warn, write_to_stderr

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
