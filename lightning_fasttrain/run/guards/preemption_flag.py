"""Agree at each step boundary whether any rank was preempted, with the same answer on all ranks."""

import atexit
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Annotated, Any

import torch
import torch.distributed as dist

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.checks.annotations import Bounds
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.host.lightning import child_watchers
from lightning_fasttrain.core.messages import explain, warn

ExitCode = Annotated[int, Bounds(0, 255)]


@check_arguments
class PreemptionFlag:
    """Whether any rank was preempted, the same on all ranks; for Fabric and bare loops, as a context manager.

    The signal handler only sets an attribute, so signals may arrive at any moment and repeatedly. With several ranks,
    each boundary starts an asynchronous all-reduce of the attribute over its own gloo group, on the CPU, and reads the
    result of the previous one, which has long finished: nothing waits for the device, and all ranks get the same answer
    at the same step, one boundary after the signal.

    If Lightning or Fabric started the other ranks, its observer, which kills the main process when a child exits with
    a nonzero code, accepts ``exit_code`` as intended, and the main process ends after its children.

    The flag replaces existing handlers and restores them afterwards. Python lets only the main thread set handlers: in
    another thread the flag warns, and signals that the main thread receives must be passed on with ``request``.

    Args:
        signals: signals that request preemption.
        every: boundaries between two exchanges with the other ranks; the answer is at most twice as many late.
        exit_code: the exit code of the ranks.

    Raises:
        TypeError, ValueError: no signals, a signal that cannot be caught, ``every`` is not an integer of at least 1, or
            ``exit_code`` is not a valid exit code.

    Example:
        >>> import signal
        >>> with PreemptionFlag() as flag:
        ...     for step in range(100):
        ...         if step == 3:  # say, a scheduler
        ...             signal.raise_signal(signal.SIGTERM)
        ...         if flag.should_stop():
        ...             break  # save here, and then: raise SystemExit(flag.exit_code)
        >>> step
        3

    Source:
        Ours. Lightning 2.6 broadcasts in the handler, which blocks when a rank other than 0 gets the signal (issue
        20806), and broadcasts from rank 0 and waits for the device at each batch (issue 21487).
    """

    def __init__(
        self, signals: Iterable[int] = (int(signal.SIGTERM),), every: PositiveInt = 1, exit_code: ExitCode = 143
    ) -> None:
        self.signals = check_signals(signals)
        self.every = every
        self.exit_code = exit_code
        # An attribute, not an Event, since a handler must not acquire a lock.
        self.raised = False
        self._previous: dict[int, Any] = {}
        self._boundaries = 0
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        # Lives as long as the group: gloo's thread would need the interpreter's lock to free it.
        self._any_rank = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def request(self) -> None:
        """Request preemption on this rank, as if the signal had arrived."""
        self.raised = True

    def should_stop(self) -> bool:
        """Whether all ranks stop here. Call it on every rank at each step boundary, until the answer is True."""
        if self._group is None and rank_count() == 1:
            return self.raised
        self._boundaries += 1
        if self._boundaries % self.every:
            return False
        if self._answer():
            return True
        self._ask()
        return False

    def should_stop_now(self) -> bool:
        """Answer without the delay of one boundary: for the start and end of the loop, where waiting is cheap."""
        if self._group is None and rank_count() == 1:
            return self.raised
        earlier = self._answer()
        self._ask()
        return self._answer() or earlier

    def _ask(self) -> None:
        if self._group is None:
            # A collective: all ranks reach it at the same boundary, as they all count the same boundaries.
            self._group = dist.new_group(backend="gloo", timeout=_timeout_of_the_ranks())
        self._any_rank.fill_(self.raised)
        self._work = dist.all_reduce(self._any_rank, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _answer(self) -> bool:
        if self._work is None:
            return False
        # The collective was started one boundary ago, so it is done, unless a rank is late.
        self._work.wait()
        self._work = None
        found = bool(self._any_rank)
        if found:
            _let_children_exit(self.exit_code)
        return found

    def __enter__(self) -> "PreemptionFlag":
        if threading.current_thread() is not threading.main_thread():
            why = "Python lets only the main thread handle signals"
            way_out = "Handle them there and call the flag's request(), or train in the main thread"
            warn(explain(f"{', '.join(map(name_of, self.signals))} cannot be handled in this thread", why, way_out))
            return self
        self._process = os.getpid()
        for number in self.signals:
            before = signal.signal(number, self._handle)
            # If it is entered twice, the first handler is the user's.
            self._previous.setdefault(number, before)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.raised = True
        else:  # a process forked from this one by the user's code is not a rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, before in self._previous.items():
            # Otherwise another handler has been installed since.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._previous = {}
        # After an error the other ranks may be gone, so nothing is sent to them.
        if kind is None and self._group is not None and dist.is_initialized():
            # Pending communication must end before the group is destroyed.
            self._answer()
            dist.destroy_process_group(self._group)
        self._group = self._work = None


def check_signals(signals: Iterable[int]) -> tuple[int, ...]:
    numbers = tuple(signals)
    if not numbers:
        raise ValueError(explain("signals=()", "no signal could request preemption", "Use signals=(signal.SIGTERM,)"))
    for number in numbers:
        if number not in signal.valid_signals() or name_of(number) in ("SIGKILL", "SIGSTOP"):
            why = f"{number!r} is not a signal that can be caught"
            raise ValueError(explain(f"signals={numbers}", why, "Use signal.SIGTERM"))
    return numbers


def name_of(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}  # real-time signals have no name
    return names.get(number, f"signal {number}")


def _timeout_of_the_ranks() -> timedelta | None:
    """Return the timeout that the user gave the run's own process group."""
    group: Any = dist.group.WORLD
    with suppress(AttributeError, RuntimeError):  # not all backends have one
        return group._get_backend(group._device_types[0]).options._timeout
    return None


def _let_children_exit(exit_code: int, patience_s: float = 60.0) -> None:
    watcher: Any
    for watcher, children in child_watchers():
        # It ends the main process when a child exits with a nonzero code.
        watcher._run = _unless_meant(watcher._run, children, exit_code)
        atexit.register(_wait_for, children, patience_s)


def _unless_meant(
    original: Callable[[], bool], children: list[subprocess.Popen[bytes]], exit_code: int
) -> Callable[[], bool]:

    def run() -> bool:
        codes = [child.poll() for child in children]
        if all(code in (None, 0, exit_code) for code in codes):
            # True ends the observer, when all children have exited.
            return None not in codes
        return original()

    return run


def _wait_for(children: list[subprocess.Popen], patience_s: float) -> None:
    for child in children:
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
