"""The ladder: rung after rung in processes of their own, each on top of those that helped."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._technique import Exactness
from lightning_fasttrain.bench.ladder.judge import (
    MEMORY_WORTH,
    TIME_WORTH,
    fastest_with_half_the_memory,
    judge,
    judge_by_memory,
    leanest_in_time,
    loss_parity,
    ratios,
    refuse_non_finite,
    time_noise,
    trainer_verdict,
    usual_noise,
)
from lightning_fasttrain.bench.ladder.paste import as_code
from lightning_fasttrain.bench.ladder.preparation import BARE, STRONG, Ladder
from lightning_fasttrain.bench.ladder.process import run_in_own_process
from lightning_fasttrain.bench.ladder.rungs import NAIVE, Rung, State, least_exact, strong_baseline, warmup_of
from lightning_fasttrain.bench.machine import hardware, versions

Row = dict[str, Any]
OnProgress = Callable[[str, dict[str, Any]], None]


def climb(ladder: Ladder, on_row: Callable[[Row], None], on_progress: OnProgress) -> Row:
    """Run the ladder. ``ladder.json`` is written after every rung, so a run that is cut short leaves what it has.

    Args:
        ladder: from :func:`.preparation.prepare`.
        on_row: called with each finished row.
        on_progress: called with a row's title and its worker's progress.

    Returns:
        What ``ladder.json`` holds; with ``interrupted`` if Ctrl-C ended it.
    """
    result = _header(ladder)
    descriptor, tokens_file = tempfile.mkstemp(prefix="fasttrain-", suffix=".npy")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            np.save(stream, ladder.tokens, allow_pickle=False)
        for row in _Climb(ladder, tokens_file, on_progress, result).rows():
            _write(result, ladder.out)
            on_row(row)
    except KeyboardInterrupt:
        result["interrupted"] = True
        _write(result, ladder.out)
    finally:
        Path(tokens_file).unlink(missing_ok=True)
    return result


def _write(result: Row, out: Path) -> None:
    rows = result["rungs"]
    if rows:
        result["noise"]["time"] = usual_noise(rows)
        fastest = fastest_with_half_the_memory(rows, result["noise"]["time"])
        leanest = leanest_in_time(rows, result["noise"]["time"])
        result["tops"] = {"fastest": _top(fastest, rows[0]), "leanest": _top(leanest, rows[0])}
    write_atomic(out / "ladder.json", json.dumps(result, indent=1, allow_nan=False) + "\n")


def _top(row: Row | None, naive: Row) -> Row | None:
    if row is None:
        return None
    said = {key: row[key] for key in ("name", "title", "exactness", "max_loss_delta", "state")}
    return {**said, **ratios(row, naive), "code": as_code(row["state"])}


def number_of_rows(ladder: Ladder) -> int:
    """Rows that :func:`climb` will give."""
    return 1 + len(ladder.baselines) + len(ladder.rungs)


class _Climb:
    """Runs what the ladder asks for, row by row, and puts each into ``result``."""

    def __init__(self, ladder: Ladder, tokens_file: str, on_progress: OnProgress, result: Row) -> None:
        self.ladder = ladder
        self.runner = _Runner(ladder, tokens_file, on_progress)
        self.result = result
        self.started = time.monotonic()

    def rows(self) -> Iterator[Row]:
        """The rows as they are finished."""
        ladder, runner, result = self.ladder, self.runner, self.result
        naive = runner.row(Rung("naive", "naive loop", {}), NAIVE, Exactness.EXACT)
        naive["carried"] = True
        runner.naive = naive
        result["rungs"].append(naive)
        yield naive
        if STRONG in ladder.baselines:
            strong = strong_baseline(ladder.fast_bf16)
            result["strong"] = runner.row(strong, strong.on(naive), strong.exactness)
            yield result["strong"]
        top = naive
        for rung in ladder.rungs:
            row = runner.row(rung, rung.on(top), least_exact(Exactness(top["exactness"]), rung.exactness))
            result["rungs"].append(row)
            self._decide(row, top)
            if ladder.each:
                # On top of naive alone this very run was the one on top of the ladder.
                alone = row if top is naive else runner.row(rung, rung.on(naive), rung.exactness, alone=True)
                row["alone"] = {key: alone[key] for key in ("step_ms", "peak_mib", "max_loss_delta", "error")}
            if row["carried"]:
                top = row
            yield row
        if BARE in ladder.baselines and top["error"] is None:
            bare = runner.row(
                Rung(BARE, "the last state, bare loop", {}), top["state"], Exactness(top["exactness"]), host="bare"
            )
            if bare["error"] is None:
                while abs(bare["step_ms"] / top["step_ms"] - 1) > TIME_WORTH and self._may_repeat(bare, top):
                    self.runner.add_run(top)
                    self.runner.add_run(bare)
                bare["trainer_overhead"] = top["step_ms"] / bare["step_ms"]
                bare["verdict"] = trainer_verdict(bare["trainer_overhead"], self._noise_of(top, bare))
            result["bare_loop"] = bare
            yield bare

    def _decide(self, row: Row, below: Row) -> None:
        """Judge ``row``; where its time and that below are too near to tell, run both again, in turn."""
        naive = self.result["rungs"][0]
        if len(naive["step_ms_of_runs"]) == 1:
            self.runner.add_run(naive)  # after the first rung: so the machine's noise is known from the beginning
        row["carried"], row["verdict"] = judge(row, below, naive, self._noise_of(row, below))
        while row["carried"] is None and self._may_repeat(row, below):
            self.runner.add_run(below)
            self.runner.add_run(row)
            row["carried"], row["verdict"] = judge(row, below, naive, self._noise_of(row, below))
        if row["carried"] is None:
            row["carried"], row["verdict"] = judge_by_memory(row, below, self._noise_of(row, below))

    def _noise_of(self, *rows: Row) -> float:
        return time_noise(*rows, usual=usual_noise(self.result["rungs"]))

    def _may_repeat(self, row: Row, below: Row) -> bool:
        disturbed = row["disturbed_cores"] or below["disturbed_cores"]
        most = self.ladder.repeats * (2 if disturbed else 1)
        if len(row["step_ms_of_runs"]) > most:
            return False
        rest = number_of_rows(self.ladder) - len(self.result["rungs"])
        elapsed_s = time.monotonic() - self.started
        mean_s = elapsed_s / sum(len(one["step_ms_of_runs"]) for one in self.result["rungs"])
        return elapsed_s + (rest + 2) * mean_s < 60 * self.ladder.size.minutes


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
        row = {
            "name": rung.name,
            "title": f"{rung.title}, alone" if alone else rung.title,
            "exactness": exactness.value,
            "own_exactness": rung.exactness.value,
            "host": host,
            "warmup": max(warmup_of(state), self.warmup),
            "carried": False,
            "verdict": "",
            **dict.fromkeys(("step_ms", "tokens_per_s", "peak_mib", "loss", "error", "disturbed_cores")),
            "step_ms_of_runs": [],
            "state": state,
        }
        measured = self._run(row)
        row.update(measured)
        row["max_loss_delta"] = loss_parity(measured, self.naive)
        if row["error"] is None:
            row["step_ms_of_runs"] = [row["step_ms"]]
        return row

    def add_run(self, row: Row) -> None:
        """Run a row again: of all its runs the median counts, which more runs make surer but not smaller."""
        measured = self._run(row)
        if measured.get("error") is not None:
            return
        row["step_ms_of_runs"].append(measured["step_ms"])
        step_ms = statistics.median(row["step_ms_of_runs"])
        row["tokens_per_s"] *= row["step_ms"] / step_ms
        row["step_ms"] = step_ms
        row["disturbed_cores"] = row["disturbed_cores"] or measured["disturbed_cores"]

    def _run(self, row: Row) -> Row:
        title = row["title"]
        spec = {**self.spec, "state": row["state"], "host": row["host"], "warmup": row["warmup"]}
        if row["name"] == STRONG:
            spec["model"] = {**spec["model"], "attention": "sdpa"}
        self.on_progress(title, {"phase": "start", "run": len(row["step_ms_of_runs"]) + 1})
        return refuse_non_finite(run_in_own_process(spec, lambda message: self.on_progress(title, message)))


def _header(ladder: Ladder) -> Row:
    model = ladder.size.model
    return {
        "hardware": {**hardware(), "device": ladder.device},
        "versions": versions(),
        "command": ladder.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "size": ladder.size_name,
            **asdict(model),
            "batch": ladder.size.batch,
            "tokens": ladder.size.tokens,
            "tokens_per_step": ladder.size.batch * model.context,
        },
        "repeats": ladder.repeats,
        "noise": {"time": None, "memory": MEMORY_WORTH},
        "rungs": [],
        "skipped": [{"name": one.rung.name, "title": one.rung.title, "reason": one.reason} for one in ladder.skipped],
        "strong": None,
        "bare_loop": None,
        "tops": {"fastest": None, "leanest": None},
        "interrupted": False,
    }
