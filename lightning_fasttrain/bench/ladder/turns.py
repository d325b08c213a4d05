"""Run states in turn, each in a process of its own, so that whatever slows the machine meets all of them."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_fasttrain.bench.ladder.process import Worker, WorkerError
from lightning_fasttrain.bench.ladder.results import Row
from lightning_fasttrain.bench.ladder.verdict import refuse_non_finite
from lightning_fasttrain.planner.timing import compare_times

FEWEST_TURNS = 3  # of a comparison; with fewer an interval is too wide for most decisions
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
