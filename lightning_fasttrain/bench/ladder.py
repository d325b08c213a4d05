"""The ladder: rung after rung in fresh processes, each on top of those that helped."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._technique import Exactness
from lightning_fasttrain.bench.judge import (
    MEMORY_NOISE,
    judge,
    loss_parity,
    ratios,
    refuse_non_finite,
    time_noise,
    trainer_verdict,
)
from lightning_fasttrain.bench.machine import hardware, versions
from lightning_fasttrain.bench.preparation import BARE, STRONG, Ladder
from lightning_fasttrain.bench.process import run_in_fresh_process
from lightning_fasttrain.bench.rungs import NAIVE, Rung, State, least_exact, strong_baseline

Row = dict[str, Any]
OnProgress = Callable[[str, dict[str, Any]], None]


def climb(ladder: Ladder, on_row: Callable[[Row], None], on_progress: OnProgress) -> Row:
    """Run the ladder. ``ladder.json`` is written after every rung, so a run that is cut short leaves what it has.

    Args:
        ladder: from :func:`.preparation.prepare`.
        on_row: called with each finished row.
        on_progress: called with a row's title and its worker's progress.

    Returns:
        What ``ladder.json`` holds.
    """
    result = _header(ladder)
    descriptor, tokens_file = tempfile.mkstemp(prefix="fasttrain-", suffix=".npy")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            np.save(stream, ladder.tokens, allow_pickle=False)
        for row in _rows(ladder, _Runner(ladder, tokens_file, on_progress), result):
            write_atomic(ladder.out / "ladder.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
            on_row(row)
    finally:
        Path(tokens_file).unlink(missing_ok=True)
    return result


def number_of_runs(ladder: Ladder) -> int:
    """Processes that :func:`climb` will start."""
    here = [rung for rung in ladder.rungs if rung.needs in (None, ladder.device)]
    return ladder.repeats * (1 + len(ladder.baselines) + len(here) * (2 if ladder.each else 1))


def _rows(ladder: Ladder, runner: "_Runner", result: Row) -> Iterator[Row]:
    """Run what the ladder asks for, one row at a time, and put each into ``result``."""
    naive = runner.run(Rung("naive", "naive loop", {}), NAIVE, Exactness.EXACT)
    naive["carried"] = True
    runner.naive = naive
    result["noise"]["time"] = time_noise(naive, ladder.device)
    result["rungs"].append(naive)
    yield naive
    if STRONG in ladder.baselines:
        strong = strong_baseline(ladder.device)
        result["strong"] = runner.run(strong, strong.on(naive), strong.exactness, attention="sdpa")
        yield result["strong"]
    exactness, top = Exactness.EXACT, naive
    for rung in ladder.rungs:
        if rung.needs not in (None, ladder.device):
            result["skipped"].append({"name": rung.name, "title": rung.title, "reason": f"needs {rung.needs}"})
            continue
        class_here = least_exact(exactness, rung.exactness)
        row = runner.run(rung, rung.on(top), class_here)
        row["carried"], row["verdict"] = judge(row, top, result["noise"]["time"])
        if ladder.each:
            # On top of naive alone this very run was the one on top of the ladder.
            alone = row if top is naive else runner.run(rung, rung.on(naive), rung.exactness, alone=True)
            row["alone"] = {key: alone[key] for key in ("step_ms", "peak_mib", "max_loss_delta", "error")}
        result["rungs"].append(row)
        if row["carried"]:
            exactness, top = class_here, row
        result["top"] = {"rungs": [r["name"] for r in result["rungs"] if r["carried"]], **ratios(top, naive)}
        yield row
    if BARE in ladder.baselines and top["error"] is None:
        bare = runner.run(Rung(BARE, "the top in a bare loop", {}), top["state"], exactness, host="bare")
        if bare["error"] is None:
            bare["trainer_overhead"] = top["step_ms"] / bare["step_ms"]
            bare["verdict"] = trainer_verdict(bare["trainer_overhead"], result["noise"]["time"])
        result["bare_loop"] = bare
        yield bare


class _Runner:
    """Runs rungs of one ladder: the same model, text, seed and number of steps for all."""

    def __init__(self, ladder: Ladder, tokens_file: str, on_progress: OnProgress) -> None:
        self.spec = {
            "model": asdict(ladder.size.model),
            "batch": ladder.size.batch,
            "tokens": tokens_file,
            "seed": 0,
            "lr": 1e-3,
            "device": ladder.device,
            "warmup": ladder.warmup,
            "timed": ladder.size.steps,
            "memory": 1,
        }
        self.repeats = ladder.repeats
        self.on_progress = on_progress
        self.naive: Row | None = None

    def run(
        self,
        rung: Rung,
        state: State,
        exactness: Exactness,
        *,
        host: str = "trainer",
        attention: str | None = None,
        alone: bool = False,
    ) -> Row:
        title = f"{rung.title}, alone" if alone else rung.title
        spec = {**self.spec, "state": state, "host": host}
        if attention is not None:
            spec["model"] = {**spec["model"], "attention": attention}
        measured, times = self._best_of(spec, title)
        return {
            "name": rung.name,
            "title": rung.title,
            "exactness": exactness.value,
            "own_exactness": rung.exactness.value,
            "carried": False,
            "verdict": "",
            **dict.fromkeys(("step_ms", "tokens_per_s", "peak_mib", "loss", "error", "disturbed_cores")),
            **measured,
            "step_ms_of_runs": times,
            "max_loss_delta": loss_parity(measured, self.naive),
            "state": state,
        }

    def _best_of(self, spec: dict[str, Any], title: str) -> tuple[dict[str, Any], list[float]]:
        """The fastest of several runs, each in its own process, and the ms/step of all; a failure ends them."""
        runs: list[dict[str, Any]] = []
        for _ in range(self.repeats):
            self.on_progress(title, {"phase": "start"})
            runs.append(refuse_non_finite(run_in_fresh_process(spec, lambda line: self.on_progress(title, line))))
            if runs[-1].get("error") is not None:
                return runs[-1], []
        return min(runs, key=lambda run: run["step_ms"]), [run["step_ms"] for run in runs]


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
        "noise": {"time": None, "memory": MEMORY_NOISE},
        "rungs": [],
        "skipped": [],
        "strong": None,
        "bare_loop": None,
        "top": None,
    }
