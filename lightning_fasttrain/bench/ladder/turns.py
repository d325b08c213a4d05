"""Run states in turn, each in a process of its own, so that whatever slows the machine meets all of them."""

import json
import math
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fasttrain.bench.ladder import worker
from lightning_fasttrain.bench.ladder.results import Row, refuse_non_finite
from lightning_fasttrain.planner.timing import compare_times

_TO_END_S = 10.0

Progress = Callable[[dict[str, Any]], None]


class WorkerError(Exception):
    """A worker failed, died or took too long."""


class Worker:
    """Trains one state in a new process, which inherits no compiled code, allocator state or global settings.

    The process warms up, measures its memory, and then pauses before each turn of timed steps, so that several
    workers can be measured in turn.

    Args:
        spec: what :func:`.worker.run_rung` takes.
        on_progress: called with each message of the worker.
        limit_s: the process is stopped if it sends nothing new to measure for this many seconds.
        work: what the process does, a function that can be imported.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        on_progress: Progress,
        limit_s: float = 3600.0,
        work: Callable[..., None] = worker.work,
    ) -> None:
        context = _way_to_start()
        self.on_progress, self.limit_s = on_progress, limit_s
        self._paused = False
        self._folder = tempfile.TemporaryDirectory(prefix="fasttrain-")
        folder = self._folder.name
        self._result_file, self._stderr_file = Path(folder, "result.json"), Path(folder, "stderr")
        self._messages, theirs = context.Pipe()
        arguments = {**spec, "folder": folder}, self._result_file, self._stderr_file, theirs
        self._process = context.Process(target=work, args=arguments)
        with _threads_that_sleep():
            self._process.start()
        # Only the worker may hold this end, or there is no EOF when it ends.
        theirs.close()

    def pause(self) -> dict[str, Any]:
        """Wait until the worker pauses, and return what it has measured so far.

        Raises:
            WorkerError: it ended instead.
        """
        end = time.monotonic() + self.limit_s
        try:
            while self._messages.poll(max(0.0, end - time.monotonic())):
                message = self._messages.recv()
                if message.get("phase") == "turn":
                    self._paused = True
                    return message
                self.on_progress(message)
        except (EOFError, OSError):
            raise WorkerError(without_paths(self._cause_of_end())) from None
        raise WorkerError(f"stopped after {self.limit_s:g} s")

    def turn(self) -> dict[str, Any]:
        """Run one turn, and return what the worker has measured so far.

        Raises:
            WorkerError: it ended instead.
        """
        self._paused = False
        try:
            self._messages.send(True)
        except OSError:
            raise WorkerError(without_paths(self._cause_of_end())) from None
        return self.pause()

    def close(self) -> None:
        """End the process. No result of it is lost, since each turn has returned them."""
        if self._paused:
            # So that it ends what it has started itself, such as processes that compile.
            with suppress(OSError):
                self._messages.send(False)
            self._process.join(_TO_END_S)
        self._process.kill()
        self._process.join()
        self._messages.close()
        self._folder.cleanup()

    def _cause_of_end(self) -> str:
        self._process.join(self.limit_s)
        if self._result_file.exists():
            found: dict[str, Any] = json.loads(self._result_file.read_text())
            return found.get("error", "the process ended before its time")
        return _cause_of_death(self._process.exitcode, self._stderr_file)


def _way_to_start() -> Any:
    """Return the multiprocessing context: a fork server where there is one, otherwise new processes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Importing torch and Lightning takes longer than many a run, so one process does it, and the workers are its forks.
    # That process never touches CUDA, which would not survive a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context


@contextmanager
def _threads_that_sleep() -> Iterator[None]:
    """Let threads of processes started here sleep while they wait for each other; by default OpenMP's spin.

    Spinning counts as processor time, so that a neighbour which delays one thread makes the others' time grow: a step
    of 16 micro-batches beside three busy processes took 9 to 16 processor-seconds with it and 3 without, of 3 on one
    thread.
    """
    key, asked_for = "OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY")
    os.environ[key] = asked_for or "passive"
    try:
        yield
    finally:
        if asked_for is None:
            del os.environ[key]


def _cause_of_death(exitcode: int | None, stderr_file: Path) -> str:
    if exitcode == -9:  # what Linux does when memory runs out
        return "the process was killed (signal 9): most likely out of memory"
    if exitcode is not None and exitcode < 0:
        return f"the process died of signal {-exitcode}"
    lines = [f"the process ended with exit code {exitcode} and no result"]
    if stderr_file.exists():
        lines += stderr_file.read_text(errors="replace").strip().splitlines()
    return lines[-1]


def without_paths(text: str) -> str:
    """Shorten absolute paths in ``text`` to their last part, so that results do not name the machine's folders.

    Example:
        >>> without_paths("no module in /home/someone/project/net.py")
        'no module in …/net.py'
    """
    return re.sub(r"(?<![\w.…])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"]+){2,}", lambda m: f"…/{_last_part(m.group())}", text)


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


FEWEST_TURNS = 3  # of a comparison; with fewer an interval is too wide for most decisions
FEWEST_ROUNDS = 6  # of the last comparison, whose ratios are not to decide, but to be told
_QUIET_CORES = 0.3  # that others may keep busy without a word
# How long a process may stay silent where the time is up: so many times as long as others, within limits.
_SLOWER, _SHORTEST_S, _LONGEST_S = 3, 60.0, 3600.0


class Running:
    """A row, and the process that runs its state.

    Args:
        row: gets what is measured.
        worker: the process, just started.
    """

    def __init__(self, row: Row, worker: Worker) -> None:
        self.row, self.worker = row, worker
        self.wall_ms: list[float] = []

    def pause(self) -> None:
        """Wait until the process pauses for the first time, when its memory is known."""
        self._note(self.worker.pause)

    def turn(self) -> float:
        """Run a turn, and return ms per step by the ladder's clock; NaN if it fails."""
        found = self._note(self.worker.turn)
        if "error" in found:
            return math.nan
        self.wall_ms.append(found["wall_ms"])
        self.row.wall_ms = statistics.median(self.wall_ms)
        if (found["cores"] or 0.0) > _QUIET_CORES:
            self.row.disturbed_cores = max(self.row.disturbed_cores or 0.0, round(found["cores"], 2))
        return found["ms"]

    def _note(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        row = self.row
        try:
            found = refuse_non_finite(measure())
        except WorkerError as error:
            found = {"error": str(error)}
        if "error" in found:
            row.error, row.losses = found["error"], []
            row.step_ms = row.tokens_per_s = row.peak_mib = row.loss = math.nan
        else:
            row.peak_mib, row.losses, row.loss, row.notes = map(found.get, ("peak_mib", "losses", "loss", "notes"))
        return found


class TimeLeft:
    """Decides whether there is time for another turn: the rows that are left come first.

    Args:
        rows: number of rows that are left.
        limit_s: seconds from now in which all of them should be done.
    """

    def __init__(self, rows: int, limit_s: float) -> None:
        self.rows, self.end = rows, time.monotonic() + limit_s
        self.starts_s: list[float] = []
        self.turns_s: list[float] = []

    def limit_s(self) -> float:
        """Return for how many seconds a process may stay silent: the time left, but no less than others needed."""
        slowest = max([*self.starts_s, *self.turns_s], default=_LONGEST_S)
        return round(min(max(self.end - time.monotonic(), _SLOWER * slowest, _SHORTEST_S), _LONGEST_S))

    def is_over(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() > self.end

    @contextmanager
    def measuring(self, durations_s: list[float]) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.monotonic()
        yield
        durations_s.append(time.monotonic() - began)

    def allows_a_turn(self, more: int) -> bool:
        """Return whether a row that has had ``more`` turns than the fewest may have another."""
        if math.isinf(self.end):
            return True
        needed_s = self.rows * (statistics.fmean(self.starts_s) + FEWEST_TURNS * statistics.fmean(self.turns_s))
        spare_s = self.end - time.monotonic() - needed_s
        # Twice an equal share, since many rows need no further turn.
        return (more + 1) * self.turns_s[-1] < 2 * spare_s / (self.rows + 1)


class Turns:
    """Starts and ends the processes of a ladder, and runs them in turn.

    Args:
        spec: what all workers have in common, of :func:`.worker.run_rung`.
        most: the most turns of a comparison.
        time_left: says whether there is time for another one.
        on_progress: called with a row's title and its worker's progress.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        most: int,
        time_left: TimeLeft,
        on_progress: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.spec, self.most, self.time_left, self.on_progress = spec, most, time_left, on_progress
        self._order = random.Random(0)
        self._running: list[Running] = []

    def start(self, row: Row, **spec: object) -> Running:
        """Start a process for the state of a row, and measure its memory."""
        self.on_progress(row.title, {"phase": "start"})
        spec = {**self.spec, "state": row.state, "host": row.host, "warmup": row.warmup, **spec}
        with self.time_left.measuring(self.time_left.starts_s):
            one = Running(row, Worker(spec, partial(self.on_progress, row.title), self.time_left.limit_s()))
            self._running.append(one)
            one.pause()
        return one

    def end(self, one: Running) -> None:
        """End the process of a row."""
        self._running.remove(one)
        one.worker.close()

    def close(self) -> None:
        """End all processes."""
        for one in list(self._running):
            self.end(one)

    def time_alone(self, one: Running) -> None:
        """Measure the time of a state by itself: that of naive, of which all other times are factors."""
        row = one.row
        for _ in range(FEWEST_TURNS):
            if row.error is None:
                row.turns_ms.append([one.turn()])
        if row.error is None:
            row.step_ms = statistics.median(ms for (ms,) in row.turns_ms)

    def compare(self, one: Running, base: Running, is_decided: Callable[[], bool]) -> None:
        """Run two states in turn, until the ratio of their times is known well enough or the time is up.

        Args:
            one: the state whose row gets the ratio.
            base: the state that it is compared with.
            is_decided: whether the ratio is known well enough, asked after each turn.
        """
        row = one.row
        if base.row.error is not None:
            return self.time_alone(one)
        row.compared = base.row.name
        while row.error is None and self._needs_turn(row, is_decided):
            self.on_progress(row.title, {"phase": "turn", "step": len(row.turns_ms) + 1})
            with self.time_left.measuring(self.time_left.turns_s):
                times = self._take_turns(base, one)
            if base.row.error is not None and row.error is None:
                row.error = f"the state below it ended: {base.row.error}"
            if row.error is None:
                row.turns_ms.append(times)
                row.set_ratio(compare_times(*zip(*row.turns_ms, strict=True)), base.row)
        return None

    def take_rounds(self, running: list[Running], is_decided: Callable[[], bool]) -> None:
        """Run several states in turn, until their ratios are known well enough or the time is up.

        Args:
            running: the states; each of their rows gets the time of each round. One that fails is left out.
            is_decided: whether the ratios are known well enough, asked after the fewest rounds.
        """
        for taken in range(max(self.most, FEWEST_ROUNDS)):
            if taken >= FEWEST_ROUNDS and (is_decided() or self.time_left.is_over()):
                break
            for one in self._order.sample(running, len(running)):
                if one.row.error is None:
                    self.on_progress(one.row.title, {"phase": "round", "step": taken + 1})
                    one.row.turns_ms.append([one.turn()])
        for one in running:
            if one.row.error is None:
                one.row.step_ms = statistics.median(ms for (ms,) in one.row.turns_ms)

    def _take_turns(self, base: Running, one: Running) -> list[float]:
        """Run a turn of each in an order that is drawn, so that neither always comes first."""
        if self._order.random() < 0.5:
            base_ms = base.turn()
            return [base_ms, one.turn()]
        one_ms = one.turn()
        return [base.turn(), one_ms]

    def _needs_turn(self, row: Row, is_decided: Callable[[], bool]) -> bool:
        turns = len(row.turns_ms)
        if turns < FEWEST_TURNS:
            return True
        return turns < self.most and not is_decided() and self.time_left.allows_a_turn(turns - FEWEST_TURNS)
