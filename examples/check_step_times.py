"""Compare predicted step times with the rungs of the ladder on an H200 and an H100, and fit a profile on them.

    python -m examples.check_step_times --out examples/results/machines

Rungs count whose turns differ by no more than a tenth. Each is predicted from the data sheet; by a profile that is
fitted on the other rungs of that GPU; and by that of the other GPU, with the peaks of this one. Then rows of
``other.csv`` in bf16, on which nothing is fitted, are predicted by the profiles; float8 is left out.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lightning_fasttrain as ft
from examples.fit_machines import FITTED, NODE, Case, Fitted, errors_of, fit, held_out, make_case, summarize
from examples.published_steps import Row, read_rows, record_llama
from lightning_fasttrain.bench.gpt import GPTModule, size_named
from lightning_fasttrain.bench.ladder.worker import callbacks_of
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.step_time.machine import Machine, read_machine
from lightning_fasttrain.step_time.predict_time import recorder_for, uses_tf32
from lightning_fasttrain.step_time.simulate_step import MOST_LAID_OUT, Timeline, lay_out

RESULTS = Path(__file__).parent / "results"
MACHINES = RESULTS / "machines"
MOST_NOISE = 0.1
# The time of copies, of 8-bit kernels and of stochastic rounding is not predicted.
LEFT_OUT = ("offload", "8-bit", "bf16-alone")
GPUS = {"h200": "H200", "h100": "H100-SXM"}


def _of_dtype(*dtypes: str) -> tuple[Any, float, float]:
    """Return how the share of some dtypes is fitted."""

    def set_share(machine: Machine, value: float) -> Machine:
        shares = dict.fromkeys(dtypes, min(value, 1.0))
        return replace(machine, product_share={**machine.product_share, **shares})

    return set_share, 0.75, 1.2


LADDER_FITTED: Fitted = {
    "float32_share": _of_dtype("float32"),
    "tf32_share": _of_dtype("tf32"),
    "bfloat16_share": _of_dtype("bfloat16", "float16"),
    **{name: FITTED[name] for name in ("attention_share", "bandwidth_share", "host_us")},
}


def ladder_cases(name: str) -> list[Case]:
    """Return the rungs of a ladder, with their recorded steps and measured seconds."""
    result = json.loads((RESULTS / f"ladder_{name}.json").read_text())
    size, batch, context = size_named(result["model"]["size"]), result["model"]["batch"], result["model"]["context"]
    ids = torch.zeros(batch, context, dtype=torch.long)
    cases = []
    for rung in [*result["rungs"], result["strong"]]:
        turns = [turn[-1] for turn in rung["turns_ms"]]
        if rung["error"] or not turns or max(turns) / min(turns) - 1 > MOST_NOISE or rung["name"] in LEFT_OUT:
            continue
        state = rung["state"]
        techniques = [one for one in callbacks_of(state) if isinstance(one, ft.Technique)]
        recorder = recorder_for(techniques)
        predict_strategies(
            lambda state=state: GPTModule(size.model, **state["optimizer"]),
            (ids, ids),
            [None],
            techniques=techniques,
            precision=state["trainer"]["precision"],
            recorder=recorder,
        )
        step, tf32 = recorder.steps[-1], uses_tf32(techniques)
        most = min(step.micro_batches, MOST_LAID_OUT)
        timelines = [Timeline(lay_out(step, count), 8, tf32) for count in (most, most - 1) if count]
        cases.append(Case({"rung": rung["name"]}, rung["step_ms"] / 1e3, timelines, step.micro_batches - most))
    return cases


def report(way: str, errors: Sequence[tuple[float, Case]], found: dict[str, Any]) -> None:
    """Print the errors of a way to predict, and add them to the results."""
    summary = summarize([error for error, _ in errors])
    rows = {case.row["rung"]: [round(case.seconds * 1e3, 1), round(error, 3)] for error, case in errors}
    found[way] = {**summary, "rung: [measured ms, error]": rows}
    print(f"{way}: {summary}\n  {rows}")


def other_cases(path: Path) -> list[Case]:
    """Return the published rows in bf16 of other software, with their recorded steps."""
    rows = [row for row in read_rows(path) if "float8" not in row["precision"]]
    return [make_case({**row, "rung": _name(row)}, record_llama(row)) for row in rows]


def _name(row: Row) -> str:
    compiled = "compiled" if row["compiled"] == "yes" else "eager"
    words = (
        row["source"],
        row["model"],
        row["gpu"],
        row["layout"],
        compiled,
        f"recomputed: {row['recompute'] or 'none'}",
    )
    return ", ".join(words)


def check_other(path: Path, profiles: dict[str, Machine], found: dict[str, Any]) -> None:
    """Predict rows that nothing was fitted on, with the memory and the network that they state."""
    ways = {
        "other.csv, data sheet × usual shares": {"H100-96GB": read_machine("H100"), "A100-80GB": read_machine("A100")},
        "other.csv, profiles": profiles,
    }
    cases = other_cases(path)
    for way, machines in ways.items():
        errors = []
        for case in cases:
            machine = machines[case.row["gpu"]]
            network = replace(machine.between, gb_per_s=float(case.row["node_gbit_s"]) / 8 / NODE)
            bandwidth = 2400 if case.row["gpu"] == "H100-96GB" else machine.gb_per_s
            errors += errors_of(replace(machine, between=network, gb_per_s=bandwidth), [case])
        report(way, errors, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="machines", help="existing folder for the profiles and ladder_errors.json")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    cases = {name: ladder_cases(name) for name in GPUS}
    profiles: dict[str, Machine] = {}
    for name, gpu in GPUS.items():
        sheet = replace(read_machine(gpu), error=None, error_90=None)
        report(f"{name}, data sheet × usual shares", errors_of(sheet, cases[name]), found)
        fitted = fit(sheet, cases[name], LADDER_FITTED)
        report(f"{name}, fitted on these rungs", errors_of(fitted, cases[name]), found)
        count = len(cases[name])
        folds = {str(one): (lambda number, _, one=one: number == one) for one in range(count)}
        left_out = held_out(sheet, cases[name], folds, LADDER_FITTED)
        report(f"{name}, fitted on the other rungs", left_out, found)
        summary = summarize([error for error, _ in left_out])
        source = f"fitted on {count} rungs of ladder_{name}.json, mean error {summary['mean']:.1%} on a rung left out"
        profiles[name] = replace(fitted, source=source, error=summary["mean"], error_90=summary["90% below"])
        print(f"Written: {profiles[name].save(Path(options.out) / f'{name}.json')}\n  {profiles[name]}")
    for name, other in (("h200", "h100"), ("h100", "h200")):
        sheet = read_machine(GPUS[name])
        moved = replace(profiles[other], gb_per_s=sheet.gb_per_s, peak_flops=sheet.peak_flops)
        # The H100's ladder has no rung in TF32.
        common = [case for case in cases[name] if other == "h200" or case.row["rung"] != "tf32"]
        report(f"{name}, by the profile of {other}", errors_of(moved, common), found)
    a100 = read_machine(Path(options.out) / "mosaic_a100_80gb.json")
    check_other(MACHINES / "other.csv", {"H100-96GB": profiles["h100"], "A100-80GB": a100}, found)
    assert all(math.isfinite(values["mean"]) for values in found.values())
    print(f"Written: {write_atomic(Path(options.out) / 'ladder_errors.json', json.dumps(found, indent=1))}")


if __name__ == "__main__":
    main()
