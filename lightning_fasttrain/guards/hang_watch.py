"""End a run that hangs, and name the rank that all others wait for, with its stack."""

import ctypes
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any, ClassVar

import lightning as L
import torch.distributed as dist

from lightning_fasttrain.core.atomic_write import refuse_unwritable
from lightning_fasttrain.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import rank_count, rank_here
from lightning_fasttrain.core.host.lightning import started_processes, surround_teardown
from lightning_fasttrain.core.messages import write_to_stderr
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Technique

_PATIENCE_S = 3.0  # a store in a stopped process does not answer


@dataclass(frozen=True)
class Position:
    """Progress of a rank.

    Attributes:
        seq: counter of its watching thread; a rank whose counter does not change is silent.
        run: number of the watched run in its process, one fit after the other.
        step: batches begun in this run.
        beats: signs of life since the batch began.
        phase: the phase that it was about to start.
        quiet_s: seconds since then.
        over: it has been quiet for longer than allowed.
        has_reported: it has shown its stacks, and waits for the end.
        error: the error with which it failed, if any.
        where: host and process.
        stack: stack of the training thread, once it is over the limit.
    """

    rank: int
    seq: int = 0
    run: int = 0
    step: int = 0
    beats: int = 0
    phase: str = ""
    quiet_s: float = 0.0
    over: bool = False
    has_reported: bool = False
    error: str = ""
    where: str = ""
    stack: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: step {self.step}, {self.phase}, quiet for {self.quiet_s:.0f} s ({self.where})"


class RankBoard:
    """Keys in the store of the default process group, over a separate connection. No method waits for a rank."""

    def __init__(self) -> None:
        # The process group's own connection may be blocked by a waiting thread.
        store = dist.distributed_c10d._get_default_store().clone()
        store.set_timeout(timedelta(seconds=_PATIENCE_S))
        self._store = dist.PrefixStore("fasttrain/hang_watch", store)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._asking: threading.Thread | None = None

    def publish(self, position: Position) -> None:
        self._try(lambda: self._store.set(str(self.rank), json.dumps(asdict(position))))

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Position] | None:
        """Return the known positions of the other ranks; None if the store does not answer."""
        wanted = range(self.size) if ranks is None else ranks

        def read_others() -> dict[int, Position]:
            found: dict[int, Position] = {}
            for rank in wanted:
                # get() waits for a missing key; check() does not.
                if rank != self.rank and self._store.check([str(rank)]):
                    found[rank] = Position(**json.loads(self._store.get(str(rank))))
            return found

        return self._try(read_others)

    def decide(self, silent: Collection[int]) -> None:
        """Announce that the run has come to a stop, and which ranks are silent."""
        self._try(lambda: self._store.set("decided", json.dumps(sorted(silent))))

    def decided(self) -> set[int] | None:
        """Return the silent ranks, if another rank has announced that the run has come to a stop."""
        store = self._store
        return self._try(lambda: set(json.loads(store.get("decided"))) if store.check(["decided"]) else None)

    def end(self) -> None:
        """Announce that everything has been reported."""
        self._try(lambda: self._store.set("end", "1"))

    def has_ended(self) -> bool:
        return bool(self._try(lambda: self._store.check(["end"])))

    def leave(self) -> None:
        """Remove this rank's position, since it has left the loop normally."""
        self._try(lambda: self._store.delete_key(str(self.rank)))

    def _try(self, ask: Callable[[], Any]) -> Any:
        """Call ``ask`` in a thread, since socket timeouts do not hold in all states of the other side."""
        # If the last request still waits, one thread is enough.
        if self._asking is not None and self._asking.is_alive():
            return None
        found: list[Any] = []

        def run() -> None:
            # The store may be gone, or not answer in time.
            with suppress(RuntimeError, ValueError):
                found.append(ask())

        # Daemon: it must not keep the process from ending.
        self._asking = threading.Thread(target=run, daemon=True, name="fasttrain-rank-board")
        self._asking.start()
        self._asking.join(_PATIENCE_S)
        return next(iter(found), None)


def find_silent_ranks(
    first: dict[int, tuple[float, int]], now: float, seen: dict[int, Position], limit_s: float
) -> set[int]:
    """Return ranks whose ``seq`` has not changed for ``limit_s``; ``first`` records when each value was first seen.

    Example:
        >>> first, seen = {}, {1: Position(1, seq=7)}
        >>> [find_silent_ranks(first, now, seen, limit_s=2.0) for now in (0.0, 3.0)]
        [set(), {1}]
    """
    for rank, position in seen.items():
        # A counter, not a time: the clocks of two machines differ.
        if rank not in first or first[rank][1] != position.seq:
            first[rank] = (now, position.seq)
    return {rank for rank in seen if now - first[rank][0] >= limit_s}


def describe(mine: Position, others: dict[int, Position] | None, silent: Collection[int], size: int) -> str:
    """Describe where each rank is and which one the others wait for; ``others`` is None if the store does not answer.

    Example:
        >>> mine = Position(0, step=3, beats=2, phase="backward", quiet_s=9.0, where="a:1")
        >>> print(describe(mine, {1: Position(1, step=3, beats=1, phase="forward", quiet_s=9.0, where="a:2")}, (), 2))
        rank 0: step 3, backward, quiet for 9 s (a:1)
        rank 1: step 3, forward, quiet for 9 s (a:2)
        rank 1 is the furthest behind: the others wait for it.
    """
    if size == 1:
        return str(mine)
    if others is None:
        holder = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return f"{mine}\nThe process group's store does not answer: {holder}, which holds it, has stopped or ended."
    everyone = {**others, mine.rank: mine}
    lines = []
    for rank in range(size):
        lines.append(str(everyone.get(rank, f"rank {rank}: no position")))
    return "\n".join([*lines, *_name_blocking_ranks(everyone, silent, size)])


def _name_blocking_ranks(everyone: dict[int, Position], silent: Collection[int], size: int) -> list[str]:
    """Name the ranks that block the others, from the most to the least informative: errors, silence, absence."""
    failed = [rank for rank, position in sorted(everyone.items()) if position.error]
    absent = [rank for rank in range(size) if rank not in everyone]
    if failed:
        lines = [f"rank {rank} failed with {everyone[rank].error}. The others wait for it." for rank in failed]
        return [*lines, *(f"It is at\n{everyone[rank].stack}" for rank in failed if everyone[rank].stack)]
    if silent:
        why = "stopped, ended, or holding Python's lock in native code. Its last position is above"
        return [f"{_ranks(silent)} silent: {why}. The others wait for it."]
    if absent:
        return [f"{_ranks(absent)} not in the loop: it has left or never started. The others wait for it."]
    places = {rank: (p.run, p.step, p.beats) for rank, p in sorted(everyone.items())}
    behind = [rank for rank, place in places.items() if place == min(places.values())]
    if len(behind) == size:
        return ["All ranks are at the same position. Their stacks show which of them does not wait for another rank."]
    stacks = [f"rank {rank} is at\n{everyone[rank].stack}" for rank in behind if everyone[rank].stack]
    return [f"{_ranks(behind)} the furthest behind: the others wait for it.", *stacks]


def _ranks(ranks: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    if len(ranks) == 1:
        return f"rank {names} is"
    return f"ranks {names} are"


_READERS = 4  # ranks that read the positions of all others at once
_RUNS = itertools.count()  # runs of this process; a rank in an earlier one is behind


@check_arguments
class ProgressWatch:
    """Ends this process if the loop shows no sign of life for too long; for Fabric and bare loops, a context manager.

    A sign of life sets one attribute: no clock, no lock, no system call. A thread reads it periodically and writes the
    progress of this rank to the store of the process group, if there is one. When all ranks have been quiet for too
    long, each prints the stacks of its threads to stderr, the lowest responsive rank reports where each rank is and
    which one the others wait for, and all exit with 1. While any rank makes progress, the others wait for it, however
    long. A rank that is stopped, or holds Python's lock in native code, counts as silent; in the latter case Python's
    ``faulthandler``, whose only timer is used for this, shows its stacks. Time in which the whole process was suspended
    does not count.

    Args:
        timeout_s: time in seconds that a rank may show no sign of life.
        first_timeout_s: the same for the first time in each phase, which may include compilation, and always for
            "checkpoint"; by default three times as long.
        folder: where ``hang-rank=N.txt`` is written as well; reports are appended to an existing file.
        children: processes that this one has started and ends with itself, with ``kill()`` and ``wait()``.
        parent: id of the process that launched this one as a rank; when it has ended, this process ends too.
        parent_rank: rank of that process, if it is one; this is verified. If silent, it is ended too.

    Attributes:
        ending: the process shows no sign of life and is about to end.

    Raises:
        TypeError, ValueError: a time is not a positive number; on entering, OSError if ``folder`` is not writable.

    Example:
        >>> with ProgressWatch(timeout_s=60) as watch:
        ...     for batch in range(3):
        ...         watch.begin_step()
        ...         watch.beat("backward")

    Source:
        Ours. A watchdog over heartbeats, as in NVIDIA's resiliency extension, which does not name the rank.
    """

    def __init__(
        self,
        timeout_s: PositiveFloat = 600.0,
        first_timeout_s: PositiveFloat | None = None,
        folder: str | os.PathLike[str] | None = None,
        children: Sequence[Popen[bytes]] = (),
        parent: PositiveInt | None = None,
        parent_rank: NonNegativeInt | None = None,
    ) -> None:
        self.timeout_s, self.first_timeout_s = timeout_s, first_timeout_s or 3 * timeout_s
        self.folder = None if folder is None else Path(folder)
        self.children, self.parent, self.parent_rank = children, parent, parent_rank
        self.rank = rank_here()
        # With this interval a hang is detected at most 5% too late.
        self._poll_s = min(5.0, self.timeout_s / 20)
        # Several polls, so that a rank that is merely slow does not count as silent.
        self._silent_s = max(2.0, 6 * self._poll_s)
        # Replaced as a whole by one assignment, so that the thread sees a consistent value; compared by identity.
        self._at: tuple[int, int, str] = (0, 0, "start")
        self._known: set[str] = set()
        self.ending = False
        self._error = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._board: RankBoard | None = None
        self._mine = Position(self.rank, where=_name_process(os.getpid()))

    def beat(self, phase: str) -> None:
        """Send a sign of life: the loop is about to start ``phase``."""
        step, beats, before = self._at
        self._known.add(before)
        self._at = (step, beats + 1, phase)

    def begin_step(self, phase: str = "forward") -> None:
        """Send a sign of life: the loop takes the next batch."""
        step, _, before = self._at
        self._known.add(before)
        self._at = (step + 1, 0, phase)

    def fail(self, error: BaseException) -> None:
        """Send a last sign of life: this rank has failed, and is only ending."""
        self._error = traceback.format_exception_only(error)[-1].strip()
        self.beat("end after an error")

    def __enter__(self) -> "ProgressWatch":
        if self.folder is not None:
            refuse_unwritable(self.folder, f"folder={str(self.folder)!r} for the reports of hangs")
            self.folder.mkdir(parents=True, exist_ok=True)
        self._mine = replace(self._mine, run=next(_RUNS))
        if rank_count() > 1:
            self._board = RankBoard()
            self._board.publish(self._mine)
            if self.parent is not None and self.parent_rank is not None:
                self._check_parent(self._board, self.parent, self.parent_rank)
        self._watched = threading.get_ident()
        # Set here, since the thread may never get the lock.
        self._set_timer_without_lock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="fasttrain-hang-watch")
        self._thread.start()
        return self

    def _check_parent(self, board: RankBoard, parent: int, rank: int) -> None:
        """Check that the launcher is a rank: one that started the ranks by hand is not, and may end before they do."""
        position = None
        until = time.monotonic() + 5  # the parent publishes its position when it enters, which may be a moment later
        while position is None and time.monotonic() < until:
            position = (board.read([rank]) or {}).get(rank)
            time.sleep(0.02)
        if position is None or position.where != _name_process(parent):
            self.parent = self.parent_rank = None

    def __exit__(self, *_: object) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        # With a timeout, since the thread may be waiting for the store.
        thread.join(self._silent_s)
        faulthandler.cancel_dump_traceback_later()
        if self._board is not None:
            self._board.leave()

    def _watch(self) -> None:
        seen, quiet_s, last = self._at, 0.0, time.monotonic()
        unanswered_s = overdue_s = 0.0
        first: dict[int, tuple[float, int]] = {}
        while not self._stop.wait(self._poll_s):
            now = time.monotonic()
            # Limited, since this process may have been suspended.
            passed = min(now - last, 2 * self._poll_s)
            last = now
            seen, quiet_s = (self._at, 0.0) if self._at is not seen else (seen, quiet_s + passed)
            self._end_without_parent()
            self._set_timer_without_lock()
            step, beats, phase = seen
            over = quiet_s >= (self.timeout_s if self._is_known(phase) else self.first_timeout_s)
            stack = self._stack(self._watched) if over else ""
            self._mine = replace(self._mine, seq=self._mine.seq + 1, step=step, beats=beats, phase=phase)
            self._mine = replace(self._mine, quiet_s=quiet_s, over=over, stack=stack, error=self._error)
            board = self._board
            if board is not None:
                board.publish(self._mine)
            if not over:
                unanswered_s, overdue_s, first = 0.0, 0.0, {}
                continue
            if board is None:
                self._end({}, set())
                continue
            overdue_s += passed
            if not self._is_my_turn(overdue_s):
                decided = board.decided()
                if decided is not None:
                    self._end({}, decided, reads=False)
                continue
            others = board.read()
            if others is None:
                unanswered_s += passed
                if unanswered_s >= self._silent_s:
                    self._end(None, set())
                continue
            silent = find_silent_ranks(first, now, others, self._silent_s)
            # All must be over the limit or silent. A rank that makes progress will reach the waiting ones.
            if board.has_ended() or all(rank in silent or position.over for rank, position in others.items()):
                board.decide(silent)
                self._end(others, silent)

    def _is_my_turn(self, overdue_s: float) -> bool:
        """Return whether this rank reads the positions of all others: a few do at first, more if those do not decide.

        If all ranks did, the requests to the store would grow with the square of their number.
        """
        return overdue_s >= (self.rank // _READERS) * 2 * self._silent_s

    def _set_timer_without_lock(self) -> None:
        """Set a timer that needs no Python lock, in case the thread cannot run before others end this process."""
        faulthandler.dump_traceback_later(max(0.8 * self.timeout_s, 4 * self._poll_s), file=2)

    def _is_known(self, phase: str) -> bool:
        """Return whether ``timeout_s`` holds for a phase, rather than ``first_timeout_s``."""
        return bool(self._error) or (phase in self._known and phase != "checkpoint")

    def _end_without_parent(self) -> None:
        # A process whose parent has ended gets another parent.
        if (parent := self.parent) is not None and os.getppid() != parent:
            write_to_stderr(f"HangWatch: rank {self.rank} ends because its launcher (process {parent}) has ended\n")
            os._exit(1)  # sys.exit would end only this thread

    def _stack(self, ident: int) -> str:
        frame = sys._current_frames().get(ident)
        if frame is None:
            return ""
        return "".join(traceback.format_stack(frame))

    def _end(self, others: dict[int, Position] | None, silent: set[int], *, reads: bool = True) -> None:
        """Print the stacks and, on the lowest rank that ``reads``, the report; end this process. Does not return."""
        faulthandler.cancel_dump_traceback_later()  # the stacks are printed below
        self.ending = True
        # The training thread first.
        threads = sorted(threading.enumerate(), key=lambda thread: thread.ident != self._watched)
        stacks = [
            f"rank {self.rank}, thread {thread.name}:\n{self._stack(thread.ident)}"
            for thread in threads
            if thread.ident is not None and not thread.name.startswith("fasttrain-")
        ]
        self._write("".join([f"HangWatch: rank {self.rank} shows no sign of life. Its stacks:\n", *stacks]))
        board = self._board
        size = board.size if board is not None else 1
        if board is not None and others is not None:
            self._mine = replace(self._mine, has_reported=True, seq=self._mine.seq + 1)
            board.publish(self._mine)
            # Only one of the responsive ranks that have read the positions reports.
            speaks = reads and min(rank for rank in (self.rank, *others) if rank not in silent) == self.rank
            others = self._wait_for(board, others, silent, speaks, reads)
        else:
            speaks = True
        if speaks:
            self._write(f"HangWatch: no sign of life within the limit.\n{describe(self._mine, others, silent, size)}\n")
            if board is not None:
                board.end()
        for child in self.children:
            child.kill()
        for child in self.children:
            # A killed process stays a zombie until it is waited for.
            with suppress(Exception):
                child.wait(5)
        if self.parent is not None and self.parent_rank is not None and (others is None or self.parent_rank in silent):
            with suppress(ProcessLookupError):  # the parent may be stopped
                # SIGTERM would not reach a process that is stopped.
                os.kill(self.parent, signal.SIGKILL)
        os._exit(1)

    def _wait_for(
        self, board: RankBoard, others: dict[int, Position], silent: set[int], speaks: bool, reads: bool
    ) -> dict[int, Position]:
        """Wait until all ranks have shown their stacks; ranks that do not report also wait for the report."""
        until = time.monotonic() + 2 * self._silent_s
        while time.monotonic() < until:
            latest = board.read() if reads else others
            if latest is None or board.has_ended():
                break
            others = latest
            if speaks and all(rank in silent or position.has_reported for rank, position in others.items()):
                break
            time.sleep(0.1)
        return others

    def _write(self, text: str) -> None:
        write_to_stderr(text)
        if self.folder is not None:
            with suppress(OSError), open(self.folder / f"hang-rank={self.rank}.txt", "a") as file:
                file.write(text)


def _name_process(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}"


class HangWatch(Technique):
    """End a run that hangs, name the rank that the others wait for, and show its stack; see :class:`ProgressWatch`.

    Acts at the hooks in which a batch begins, its backward, the optimizer step and the end of the batch, in evaluation,
    and when a checkpoint is saved: each is a sign of life. Long validation is therefore not a hang; a single batch, or
    a wait for data, of more than ``timeout_s`` is one, and so is a save of more than ``first_timeout_s``.

    If Lightning or torchrun launched this process as a rank, it ends when its launcher does; Lightning's main process
    ends its children. When one of several ranks fails, its error is shown at once, before other exception handlers can
    wait for the other ranks, and the time limit also holds for that wait.

    Args:
        timeout_s, first_timeout_s, folder: as in :class:`ProgressWatch`.

    Raises:
        ValueError: a time is not positive.

    Example:
        >>> watch = HangWatch(timeout_s=300)

    Source:
        See :class:`ProgressWatch`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a run that hangs ends, and the rank that hangs is named with its stack"
    when: ClassVar[str] = "a run has several processes, or is unattended for hours"
    in_a_loop: ClassVar[str] = "guards.ProgressWatch(timeout_s).beat(phase)"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        timeout_s: PositiveFloat = 600.0,
        first_timeout_s: PositiveFloat | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.timeout_s, self.first_timeout_s = timeout_s, first_timeout_s
        self.folder = folder
        self._watch: ProgressWatch | None = None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        children = started_processes(trainer.strategy)
        is_child = children is not None and trainer.local_rank > 0
        parent_rank = trainer.global_rank - trainer.local_rank if is_child else None
        launched = parent_rank is not None or "TORCHELASTIC_RUN_ID" in os.environ
        parent = os.getppid() if launched else None
        watch = ProgressWatch(self.timeout_s, self.first_timeout_s, self.folder, children or (), parent, parent_rank)
        self._watch = watch.__enter__()
        if watch.parent is not None:
            # A process that is stopped, or holds Python's lock, would not handle another signal.
            _die_with_parent(signal.SIGKILL)

        def stop() -> None:
            self._watch = None
            watch.__exit__()

        def stop_after(teardown: Callable[[], None]) -> None:
            try:
                teardown()
            finally:
                stop()

        def leave() -> None:
            if trainer.interrupted and trainer.world_size > 1:
                # A failed rank is watched until the end of its teardown, in which other exception handlers may wait
                # for ranks that wait for this one.
                watch.fail(sys.exception() or RuntimeError("unknown"))
                surround_teardown(trainer, stop_after)
                return
            _outlive_parent(watch)
            stop()

        return leave

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: show the error before any rank can be made to wait."""
        # If the watch is ending the run, this error is only a consequence.
        ending = self._watch is not None and self._watch.ending
        # KeyboardInterrupt and SystemExit are not failures.
        if trainer.world_size > 1 and isinstance(exception, Exception) and not ending:
            write_to_stderr(f"rank {trainer.global_rank} failed:\n{''.join(traceback.format_exception(exception))}")
        super().on_exception(trainer, pl_module, exception)

    def _beat(self, phase: str) -> None:
        if self._watch is not None:
            self._watch.beat(phase)

    def on_train_batch_start(self, *_: object) -> None:
        """Hook, like all that follow: send a sign of life."""
        if self._watch is not None:
            self._watch.begin_step()

    def on_before_backward(self, *_: object) -> None:
        self._beat("backward")

    def on_before_optimizer_step(self, *_: object) -> None:
        self._beat("optimizer step")

    def on_train_batch_end(self, *_: object) -> None:
        self._beat("next batch")

    def on_validation_batch_start(self, *_: object) -> None:
        self._beat("evaluation")

    def on_validation_end(self, *_: object) -> None:
        self._beat("after evaluation")

    def on_save_checkpoint(self, *_: object) -> None:
        self._beat("checkpoint")

    def on_train_end(self, *_: object) -> None:
        """Hook: from here on a rank may continue after the others have ended."""
        if self._watch is not None:
            self._watch.beat("end of training")
            _outlive_parent(self._watch)

    def on_test_batch_start(self, *_: object) -> None:
        self._beat("evaluation")

    def on_predict_batch_start(self, *_: object) -> None:
        self._beat("prediction")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_watch": None}  # a thread cannot be copied


def _outlive_parent(watch: ProgressWatch) -> None:
    if watch.parent is not None:
        watch.parent = None
        _die_with_parent(0)


def _die_with_parent(number: int) -> None:
    """Have Linux end this process with its launcher, even if stopped; elsewhere the watching thread does it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            # 1 is PR_SET_PDEATHSIG, and the signal 0 cancels it.
            ctypes.CDLL(None).prctl(1, number)
