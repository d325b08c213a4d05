"""Run the ladder: rung after rung, each in turn with the state it stands on; then the best states with baselines."""

import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fasttrain.bench.ladder.preflight import BARE, PADDED, STRONG, Ladder
from lightning_fasttrain.bench.ladder.results import (
    BASELINES,
    MEMORY_WORTH,
    PRODUCTS,
    TIME_WORTH,
    Climbed,
    Row,
    State,
    choose_stacks,
    compare_in_turn,
    describe,
    judge_row,
    judge_undecided,
    loss_parity,
    ratio_of,
    trainer_verdict,
)
from lightning_fasttrain.bench.ladder.rungs import NAIVE, Rung, padded_rungs, strong_baselines, warmup_of
from lightning_fasttrain.bench.ladder.turns import FEWEST_ROUNDS, Running, TimeLeft, Turns
from lightning_fasttrain.bench.ladder.worker import callbacks_of
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.planner.candidates import code_of
from lightning_fasttrain.planner.timing import Ratio
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import least_exact

# Rounds of the last comparison end when every ratio is known to this share.
_PRECISE = 0.04
# What the last comparison takes beside a climb's, as a number of its rows.
_AS_ROWS = 10


def as_code(state: State) -> str:
    """Return code to paste into a training script for the same techniques.

    Args:
        state: in the form of :data:`.rungs.NAIVE`.

    Example:
        >>> print(as_code({"callbacks": {"MicroBatching": {"n": 4}}, "trainer": {"precision": "bf16-mixed"},
        ...                "optimizer": {"fused": True}, "loop": {"print_loss": False, "pin_memory": True}}))
        import lightning as L
        import lightning_fasttrain as ft
        <BLANKLINE>
        trainer = L.Trainer(
            precision='bf16-mixed',
            callbacks=[
                ft.MicroBatching(n=4),
            ],
        )
        # in configure_optimizers: torch.optim.AdamW(..., fused=True)
        # no loss.item() or print in the step; DataLoader(..., pin_memory=True) for a GPU
    """
    lines = ["import lightning as L", "import lightning_fasttrain as ft", "", "trainer = L.Trainer("]
    lines += [f"    {name}={value!r}," for name, value in state["trainer"].items()]
    if state["callbacks"]:
        callbacks = [f"        {code_of(callback)}," for callback in callbacks_of(state)]
        lines += ["    callbacks=[", *callbacks, "    ],"]
    lines.append(")")
    named = {key: value for key, value in state["optimizer"].items() if key != "fused"}
    if named:
        arguments = ", ".join(f"{key}={value!r}" for key, value in named.items())
        lines.append(f"# in configure_optimizers: ft.build_optimizer(self, {arguments})")
    elif state["optimizer"].get("fused"):
        lines.append("# in configure_optimizers: torch.optim.AdamW(..., fused=True)")
    if not state["loop"].get("print_loss"):
        lines.append("# no loss.item() or print in the step; DataLoader(..., pin_memory=True) for a GPU")
    return "\n".join(lines)


OnProgress = Callable[[str, dict[str, Any]], None]


def climb(ladder: Ladder, on_row: Callable[[Row], None], on_progress: OnProgress) -> Climbed:
    """Run the ladder. ``ladder.json`` is written after every rung, so a run that is cut short leaves what it has.

    Args:
        ladder: from :func:`.preflight.prepare`.
        on_row: called with each finished row.
        on_progress: called with a row's title and its worker's progress.

    Returns:
        What ``ladder.json`` holds; with ``interrupted`` if Ctrl-C ended it.
    """
    result = _begin_result(ladder)
    descriptor, tokens_file = tempfile.mkstemp(prefix="fasttrain-", suffix=".npy")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            # The workers map this file, instead of each being sent a copy.
            np.save(stream, ladder.tokens, allow_pickle=False)
        climbing = _Climb(ladder, tokens_file, on_progress, result)
        try:
            for row in climbing.rows():
                _save(result, ladder.out)
                on_row(row)
            climbing.measure_finals()
            result.write(ladder.out / "ladder.json")
        finally:
            climbing.turns.close()
    except KeyboardInterrupt:
        result.interrupted = True
        _save(result, ladder.out)
    finally:
        Path(tokens_file).unlink(missing_ok=True)
    return result


def _save(result: Climbed, folder: Path) -> None:
    widths = [ratio_of(row).plus_minus for row in result.rungs if row.ratio]
    noise = statistics.median(widths or [math.inf])
    # JSON has no infinity, which is the width of an interval of one turn.
    result.noise["time"] = noise if math.isfinite(noise) else None
    result.write(folder / "ladder.json")


def describe_stacks(finals: list[Row]) -> dict[str, dict[str, Any]]:
    """Choose the stacks from rows that were run in turn, and compare each with every baseline.

    Args:
        finals: naive first; the others that are no states of the climb are known by their names.

    Returns:
        Name of the stack → what :class:`.Climbed` says.
    """
    baselines = [row for row in finals if row.name in BASELINES and row.error is None]
    rows = [row for row in finals if row.name not in (*BASELINES, PRODUCTS)]
    stacks = choose_stacks(finals[0], rows, min(row.peak_mib for row in baselines))
    return {name: _describe_stack(row, baselines) for name, row in stacks.items()}


_OF_STACK = ("name", "title", "max_loss_delta", "state", "step_ms", "peak_mib")


def _describe_stack(row: Row, baselines: list[Row]) -> dict[str, Any]:
    against = {}
    for base in baselines:
        ratio = compare_in_turn(row, base)
        faster = {"speedup": 1 / ratio.value, "plus_minus": ratio.plus_minus}
        against[base.name] = {**faster, "memory_ratio": base.peak_mib / row.peak_mib}
    top = {key: getattr(row, key) for key in _OF_STACK}
    return {**top, **against["naive"], "exactness": row.exactness.value, "against": against, "code": as_code(row.state)}


def number_of_rows(ladder: Ladder) -> int:
    """Return the number of rows of :func:`climb`, without the last comparison."""
    return 1 + len(ladder.rungs) + (BARE in ladder.baselines) + 2 * (PADDED in ladder.baselines)


class _Climb:
    """Runs a ladder row by row, and adds each row to ``result``."""

    def __init__(self, ladder: Ladder, tokens_file: str, on_progress: OnProgress, result: Climbed) -> None:
        self.ladder, self.result = ladder, result
        rows = number_of_rows(ladder) + _AS_ROWS
        if ladder.each:
            rows += len(ladder.rungs)
        spec = {
            "model": asdict(ladder.size.model),
            "batch": ladder.size.batch,
            "tokens": tokens_file,
            "seed": 0,
            "lr": 1e-3,
            "device": ladder.device,
            "timed": ladder.size.steps,
            "memory": 1,
            # Enough for naive, if every other state is compared with it; a process ends with its last turn.
            "turns": max(ladder.turns, FEWEST_ROUNDS) * rows + 1,
        }
        time_left = TimeLeft(rows, 60 * ladder.size.minutes)
        self.turns = Turns(spec, ladder.turns, time_left, on_progress)

    def rows(self) -> Iterator[Row]:
        """Yield the rows as they are finished."""
        ladder, result = self.ladder, self.result
        self.naive = self.top = self._start(_new_row(Rung("naive", "naive loop", {}), NAIVE, Exactness.EXACT))
        naive = self.naive.row
        naive.carried = True
        self.turns.time_alone(self.naive)
        result.rungs.append(naive)
        yield self._finish(naive)
        for rung in ladder.rungs:
            row = self._climb(rung)
            result.rungs.append(row)
            yield self._finish(row)
        if BARE in ladder.baselines and self.top.row.error is None:
            result.bare_loop = self._measure_bare_loop()
            yield self._finish(result.bare_loop)
        if PADDED in ladder.baselines:
            whole, cut = padded_rungs(ladder.mixed, ladder.size.micro_batches)
            below = self._start(_new_row(whole, whole.on(naive), whole.exactness), padded=True)
            self.turns.time_alone(below)
            result.padded.append(below.row)
            yield self._finish(below.row, below.row)
            row = self._measure(_new_row(cut, cut.on(below.row), cut.exactness), below, padded=True)
            self.turns.end(below)
            if row.error is None and below.row.error is None:
                row.verdict = f"{describe(ratio_of(row), row.peak_mib / below.row.peak_mib)} than with padding."
            result.padded.append(row)
            yield self._finish(row, below.row)

    def measure_finals(self) -> None:
        """Run the best states of the climb in turn with naive, the strong baselines and the products alone."""
        naive, *rows = self.result.rungs
        if naive.error is not None:
            return
        running = [self._measure_again(self.naive)]
        if STRONG in self.ladder.baselines:
            for rung in strong_baselines(self.ladder.mixed):
                running.append(self._start(_new_row(rung, rung.on(naive), rung.exactness)))
            alone = _new_row(Rung(PRODUCTS, "its matrix products alone", {}), running[1].row.state, Exactness.EXACT)
            running.append(self._start(replace(alone, host=PRODUCTS)))
        limit_mib = min(one.row.peak_mib for one in running if one.row.name != PRODUCTS and one.row.error is None)
        for row in _choose_candidates(naive, rows, limit_mib):
            is_running = row is self.top.row
            running.append(self._measure_again(self.top) if is_running else self._start(_again(row)))
        finals = [one.row for one in running]
        self.turns.take_rounds(running, lambda: _are_known(finals))
        for row in finals:
            if row.host != PRODUCTS:
                row.max_loss_delta = loss_parity(row, finals[0])
        self.result.finals = finals
        if finals[0].error is None:
            self.result.tops = describe_stacks(finals)

    def _measure_again(self, one: Running) -> Running:
        """Return the process of a row with a new row, whose turns are those of the last comparison."""
        return Running(_again(one.row), one.worker)

    def _climb(self, rung: Rung) -> Row:
        """Run a rung in turn with the state below it, and keep the one of the two that the next stands on."""
        below = self.top
        row = _new_row(rung, rung.on(below.row), least_exact(below.row.exactness, rung.exactness))
        rising = self._start(row)
        naive = self.naive.row
        self.turns.compare(rising, below, lambda: judge_row(row, below.row, naive)[0] is not None)
        row.carried, row.verdict = judge_row(row, below.row, naive)
        if row.carried is None:
            row.carried, row.verdict = judge_undecided(row, below.row)
        if self.ladder.each:
            # On top of naive alone this very run was the one on top of the ladder.
            # A copy of it, as a row that holds itself could not be written as JSON.
            row.alone = replace(row) if below is self.naive else self._measure_alone(rung)
        left = rising
        if row.carried:
            self.top, left = rising, below
        if left is not self.naive:
            self.turns.end(left)
        return row

    def _measure_alone(self, rung: Rung) -> Row:
        row = _new_row(rung, rung.on(self.naive.row), rung.exactness)
        row.title += ", alone"
        return self._finish(self._measure(row, self.naive))

    def _measure_bare_loop(self) -> Row:
        top = self.top.row
        bare = _new_row(Rung(BARE, "the last state, bare loop", {}), top.state, top.exactness, host="bare")
        self._measure(bare, self.top)
        if bare.error is None:
            low, value, high = bare.ratio
            bare.trainer_overhead = 1 / value
            bare.verdict = trainer_verdict(Ratio(1 / value, 1 / high, 1 / low if low else math.inf))
        return bare

    def _measure(self, row: Row, base: Running, *, padded: bool = False) -> Row:
        """Run a state in turn with ``base`` until its time is known to :data:`TIME_WORTH`, and end its process."""
        one = self._start(row, padded=padded)
        self._compare(one, base)
        self.turns.end(one)
        return row

    def _compare(self, one: Running, base: Running) -> None:
        self.turns.compare(one, base, lambda: ratio_of(one.row).plus_minus <= TIME_WORTH)

    def _start(self, row: Row, *, padded: bool = False) -> Running:
        row.warmup = max(warmup_of(row.state), self.ladder.warmup)
        if row.name in BASELINES[1:]:
            # A strong baseline has fused attention, whatever the ladder is run with.
            return self.turns.start(row, model={**self.turns.spec["model"], "attention": "sdpa"})
        return self.turns.start(row, padded=padded)

    def _finish(self, row: Row, reference: Row | None = None) -> Row:
        reference = reference or self.naive.row
        row.max_loss_delta = loss_parity(row, None if row is reference else reference)
        if row.error is None:
            row.tokens_per_s = 1e3 * self.ladder.size.batch * self.ladder.size.model.context / row.step_ms
        self.turns.time_left.rows -= 1
        return row


def _again(row: Row) -> Row:
    return replace(row, turns_ms=[], compared="", ratio=[])


def _choose_candidates(naive: Row, rows: list[Row], limit_mib: float) -> list[Row]:
    """Return the states that may be a stack once they are run in turn: of the fastest two, as times are uncertain."""
    stacks = choose_stacks(naive, rows, limit_mib)
    second = [row for row in rows if row is not stacks.get("fast")]
    chosen = [*stacks.values(), *choose_stacks(naive, second, limit_mib).values()]
    names = {row.name for row in chosen}
    return [row for row in rows if row.name in names]


def _are_known(finals: list[Row]) -> bool:
    """Whether the time of each state against each baseline is known well enough."""
    ran = [row for row in finals if row.error is None]
    baselines = [row for row in ran if row.name in BASELINES]
    pairs = itertools.product(baselines, ran)
    return all(compare_in_turn(row, base).plus_minus <= _PRECISE for base, row in pairs)


def _new_row(rung: Rung, state: State, exactness: Exactness, *, host: str = "trainer") -> Row:
    own = {"name": rung.name, "title": rung.title, "own_exactness": rung.exactness, "free": rung.free}
    return Row(**own, exactness=exactness, host=host, state=state)


def _begin_result(ladder: Ladder) -> Climbed:
    model = ladder.size.model
    named = {"size": ladder.size_name, **asdict(model), "batch": ladder.size.batch, "tokens": ladder.size.tokens}
    return Climbed(
        hardware={**hardware(), "device": ladder.device},
        versions=versions(),
        command=ladder.command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model={**named, "tokens_per_step": ladder.size.batch * model.context},
        skipped=list(ladder.skipped),
        noise={"time": None, "memory": MEMORY_WORTH},
        turns=ladder.turns,
        clock="device" if ladder.device == "cuda" else "processor",
    )
