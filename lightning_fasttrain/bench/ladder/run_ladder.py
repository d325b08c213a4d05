"""Run the ladder: rung after rung in processes of their own, each on top of those that helped."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fasttrain.bench.ladder.preflight import BARE, STRONG, Ladder
from lightning_fasttrain.bench.ladder.process import run_in_own_process
from lightning_fasttrain.bench.ladder.results import Climbed, Measured, Row, State, Top
from lightning_fasttrain.bench.ladder.rungs import NAIVE, Rung, strong_baseline, warmup_of
from lightning_fasttrain.bench.ladder.verdict import (
    MEMORY_WORTH,
    TIME_WORTH,
    fastest_with_half_the_memory,
    judge,
    judge_by_memory,
    leanest_in_time,
    loss_parity,
    refuse_non_finite,
    time_noise,
    trainer_verdict,
    usual_noise,
)
from lightning_fasttrain.bench.ladder.worker import callbacks_of
from lightning_fasttrain.core.machine import hardware, versions
from lightning_fasttrain.planner.catalogue import code_of
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import least_exact


def as_code(state: State) -> str:
    """Return code to paste into a training script for the same techniques. It needs ``L``, ``ft`` and ``torch``.

    Args:
        state: in the form of :data:`.rungs.NAIVE`.

    Example:
        >>> print(as_code({"callbacks": {"MicroBatching": {"n": 4}}, "trainer": {"precision": "bf16-mixed"},
        ...                "optimizer": {"fused": True}, "loop": {"print_loss": False, "pin_memory": True}}))
        trainer = L.Trainer(
            precision='bf16-mixed',
            callbacks=[
                ft.MicroBatching(n=4),
            ],
        )
        # in configure_optimizers: torch.optim.AdamW(..., fused=True)
        # no loss.item() or print in the step; DataLoader(..., pin_memory=True) for a GPU
    """
    lines = ["trainer = L.Trainer("]
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
        for row in _Climb(ladder, tokens_file, on_progress, result).rows():
            _save(result, ladder.out)
            on_row(row)
    except KeyboardInterrupt:
        result.interrupted = True
        _save(result, ladder.out)
    finally:
        Path(tokens_file).unlink(missing_ok=True)
    return result


def _save(result: Climbed, folder: Path) -> None:
    rows = result.rungs
    if rows:
        noise = usual_noise(rows)
        result.noise["time"] = noise
        result.tops = {
            "fastest": _describe_top(fastest_with_half_the_memory(rows, noise), rows[0]),
            "leanest": _describe_top(leanest_in_time(rows, noise), rows[0]),
        }
    result.write(folder / "ladder.json")


def _describe_top(row: Row | None, naive: Row) -> Top | None:
    if row is None:
        return None
    return Top(
        name=row.name,
        title=row.title,
        exactness=row.exactness,
        max_loss_delta=row.max_loss_delta,
        state=row.state,
        step_ms=row.step_ms,
        peak_mib=row.peak_mib,
        speedup=naive.step_ms / row.step_ms,
        memory_ratio=naive.peak_mib / row.peak_mib,
        code=as_code(row.state),
    )


def number_of_rows(ladder: Ladder) -> int:
    """Return the number of rows of :func:`climb`."""
    return 1 + len(ladder.baselines) + len(ladder.rungs)


class _Climb:
    """Runs a ladder row by row, and adds each row to ``result``."""

    def __init__(self, ladder: Ladder, tokens_file: str, on_progress: OnProgress, result: Climbed) -> None:
        self.ladder = ladder
        self.runner = _Runner(ladder, tokens_file, on_progress)
        self.result = result
        self.started = time.monotonic()

    def rows(self) -> Iterator[Row]:
        """Yield the rows as they are finished."""
        ladder, runner, result = self.ladder, self.runner, self.result
        naive = runner.row(Rung("naive", "naive loop", {}), NAIVE, Exactness.EXACT)
        naive.carried = True
        runner.naive = naive
        result.rungs.append(naive)
        yield naive
        if STRONG in ladder.baselines:
            strong = strong_baseline(ladder.fast_bf16)
            result.strong = runner.row(strong, strong.on(naive), strong.exactness)
            yield result.strong
        top = naive
        for rung in ladder.rungs:
            row = runner.row(rung, rung.on(top), least_exact(top.exactness, rung.exactness))
            result.rungs.append(row)
            self._decide(row, top)
            if ladder.each:
                # On top of naive alone this very run was the one on top of the ladder.
                # A copy of it, as a row that holds itself could not be written as JSON.
                on_naive = top is naive
                row.alone = replace(row) if on_naive else runner.row(rung, rung.on(naive), rung.exactness, alone=True)
            if row.carried:
                top = row
            yield row
        if BARE in ladder.baselines and top.error is None:
            bare = runner.row(Rung(BARE, "the last state, bare loop", {}), top.state, top.exactness, host="bare")
            if bare.error is None:
                while abs(bare.step_ms / top.step_ms - 1) > TIME_WORTH and self._may_repeat(bare, top):
                    # Both run again, in turn, so that whatever disturbs the machine meets both.
                    self.runner.add_run(top)
                    self.runner.add_run(bare)
                bare.trainer_overhead = top.step_ms / bare.step_ms
                bare.verdict = trainer_verdict(bare.trainer_overhead, self._noise_of(top, bare))
            result.bare_loop = bare
            yield bare

    def _decide(self, row: Row, below: Row) -> None:
        """Judge ``row``; if its time is too close to that of the row below, run both again, in turn."""
        naive = self.result.rungs[0]
        if len(naive.step_ms_of_runs) == 1:
            # The noise of the machine must be known before the first verdict.
            self.runner.add_run(naive)
        row.carried, row.verdict = judge(row, below, naive, self._noise_of(row, below))
        while row.carried is None and self._may_repeat(row, below):
            self.runner.add_run(below)
            self.runner.add_run(row)
            row.carried, row.verdict = judge(row, below, naive, self._noise_of(row, below))
        if row.carried is None:
            row.carried, row.verdict = judge_by_memory(row, below, self._noise_of(row, below))

    def _noise_of(self, *rows: Row) -> float:
        return time_noise(*rows, usual=usual_noise(self.result.rungs))

    def _may_repeat(self, row: Row, below: Row) -> bool:
        disturbed = row.disturbed_cores or below.disturbed_cores
        most = self.ladder.repeats * (2 if disturbed else 1)
        if len(row.step_ms_of_runs) > most:
            return False
        rest = number_of_rows(self.ladder) - len(self.result.rungs)
        elapsed_s = time.monotonic() - self.started
        mean_s = elapsed_s / sum(len(one.step_ms_of_runs) for one in self.result.rungs)
        return elapsed_s + (rest + 2) * mean_s < 60 * self.ladder.size.minutes  # 2: both would be run once more


class _Runner:
    """Runs rungs of one ladder: the same model, text, seed and number of timed steps for all."""

    def __init__(self, ladder: Ladder, tokens_file: str, on_progress: OnProgress) -> None:
        self.spec = {
            "model": asdict(ladder.size.model),
            "batch": ladder.size.batch,
            "tokens": tokens_file,
            "seed": 0,
            "lr": 1e-3,
            "device": ladder.device,
            "timed": ladder.size.steps,
            "memory": 1,
        }
        self.warmup = ladder.warmup
        self.on_progress = on_progress
        self.naive: Row | None = None

    def row(self, rung: Rung, state: State, exactness: Exactness, *, host: str = "trainer", alone: bool = False) -> Row:
        """Run a rung once."""
        row = Row(
            name=rung.name,
            title=f"{rung.title}, alone" if alone else rung.title,
            exactness=exactness,
            own_exactness=rung.exactness,
            host=host,
            warmup=max(warmup_of(state), self.warmup),
            state=state,
        )
        row.take(self._run(row))
        row.max_loss_delta = loss_parity(row, self.naive)
        if row.error is None:
            row.step_ms_of_runs = [row.step_ms]
        return row

    def add_run(self, row: Row) -> None:
        """Run a row again; the median of all its runs counts, which more runs do not make smaller."""
        measured = self._run(row)
        if measured.error is not None:
            return
        row.step_ms_of_runs.append(measured.step_ms)
        step_ms = statistics.median(row.step_ms_of_runs)
        row.tokens_per_s *= row.step_ms / step_ms  # the tokens of a step stay the same
        row.step_ms = step_ms
        row.disturbed_cores = row.disturbed_cores or measured.disturbed_cores

    def _run(self, row: Row) -> Measured:
        title = row.title
        spec = {**self.spec, "state": row.state, "host": row.host, "warmup": row.warmup}
        if row.name == STRONG:
            # The strong baseline has fused attention, whatever the ladder is run with.
            spec["model"] = {**spec["model"], "attention": "sdpa"}
        self.on_progress(title, {"phase": "start", "run": len(row.step_ms_of_runs) + 1})
        found = run_in_own_process(spec, lambda message: self.on_progress(title, message))
        return Measured(**refuse_non_finite(found))


def _begin_result(ladder: Ladder) -> Climbed:
    model = ladder.size.model
    return Climbed(
        hardware={**hardware(), "device": ladder.device},
        versions=versions(),
        command=ladder.command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model={
            "size": ladder.size_name,
            **asdict(model),
            "batch": ladder.size.batch,
            "tokens": ladder.size.tokens,
            "tokens_per_step": ladder.size.batch * model.context,
        },
        repeats=ladder.repeats,
        skipped=list(ladder.skipped),
        noise={"time": None, "memory": MEMORY_WORTH},
    )
