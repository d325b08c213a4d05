"""Fit profiles of machines on published step times, and say how far predictions are from rows that were not fitted.

    python -m examples.fit_machines examples/results/machines/mpt.csv --out examples/results/machines

Recording the steps of 110 rows takes about ten minutes, the fits another two. Each profile holds its own error; the
errors on rows that were held out, one half at random and whole model sizes, are in ``errors.json``.
"""

import argparse
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from examples.published_steps import Row, read_rows, record_row
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.step_time.machine import Link, Machine, read_machine
from lightning_fasttrain.step_time.record_step import RecordedStep
from lightning_fasttrain.step_time.simulate_step import MOST_LAID_OUT, Timeline, lay_out

NODE = 8  # GPUs
GBIT_OF_H100 = 3200.0  # of a node, where the table does not state it
PROFILES = {"A100-40GB": "mosaic_a100_40gb", "A100-80GB": "mosaic_a100_80gb", "H100-80GB": "mosaic_h100"}
ACCELERATORS = {"A100-40GB": "A100-40GB", "A100-80GB": "A100-80GB", "H100-80GB": "H100-SXM"}
# What is fitted: how a value enters a machine, what it is expected to be, and by which factor it may usually differ.
Setter = Callable[[Machine, float], Machine]
Fitted = Mapping[str, tuple[Setter, float, float]]


def _set_product_share(machine: Machine, value: float) -> Machine:
    return replace(machine, product_share=dict.fromkeys(machine.peak_flops, min(value, 1.0)))


def _set_attention_share(machine: Machine, value: float) -> Machine:
    return replace(machine, attention_share=min(value, 1.0), attention_backward_share=min(0.85 * value, 1.0))


def _set_inside(machine: Machine, value: float) -> Machine:
    return replace(machine, inside=replace(machine.inside, share=min(value, 1.0)))


def _set_between(machine: Machine, value: float) -> Machine:
    return replace(machine, between=replace(machine.between, share=min(value, 1.0)))


def _set_latency(machine: Machine, value: float) -> Machine:
    return replace(machine, between=replace(machine.between, latency_us=value))


FITTED: Fitted = {
    "product_share": (_set_product_share, 0.8, 1.15),
    "product_half_size": (lambda machine, value: replace(machine, product_half_size=value), 200.0, 2.5),
    "attention_share": (_set_attention_share, 0.35, 1.6),
    "bandwidth_share": (lambda machine, value: replace(machine, bandwidth_share=min(value, 1.0)), 0.7, 1.3),
    "host_us": (lambda machine, value: replace(machine, host_us=value), 38.0, 1.8),
    "inside_share": (_set_inside, 0.7, 1.4),
    "between_share": (_set_between, 0.6, 1.5),
    "between_latency_us": (_set_latency, 10.0, 2.0),
    "disturbance": (lambda machine, value: replace(machine, overlap=1 - min(value, 1.0)), 0.2, 2.0),
}
EXACT = 0.03  # relative error of a row that is as good as expected


@dataclass
class Case:
    """A row with its recorded step, laid out once and with one micro-batch less."""

    row: Row
    seconds: float
    timelines: list[Timeline]
    further: int

    def predict(self, machine: Machine) -> float:
        simulated = [timeline.simulate(machine) for timeline in self.timelines]
        if not self.further:
            return simulated[0].seconds
        return simulated[0].continued(simulated[1], self.further).seconds


def make_case(row: Row, step: RecordedStep) -> Case:
    """Return the case of a row: its measured seconds, and the arrays of its step."""
    tokens = int(row["micro_batch"]) * int(row["length"]) * int(row["accumulate"])
    most = min(step.micro_batches, MOST_LAID_OUT)
    laid_out = [lay_out(step, most)]
    if step.micro_batches > most:
        laid_out.append(lay_out(step, most - 1))
    timelines = [Timeline(events, NODE) for events in laid_out]
    return Case(row, tokens / float(row["tokens_per_s_gpu"]), timelines, step.micro_batches - most)


def start_of(gpu: str, rows: Sequence[Row]) -> Machine:
    """Return the machine before it is fitted: its data sheet, with the network that the rows state."""
    machine = read_machine(ACCELERATORS[gpu])
    gbit = float(rows[0].get("node_gbit_s") or GBIT_OF_H100)
    between = Link(gbit / 8 / NODE, machine.between.latency_us, machine.between.share)
    # Nothing is known of other precisions.
    known = {"bfloat16": machine.peak_flops["bfloat16"], "float16": machine.peak_flops["float16"]}
    shares = dict.fromkeys(known, machine.product_share["bfloat16"])
    machine = replace(machine, peak_flops=known, product_share=shares, error=None, error_90=None)
    return replace(machine, name=gpu, between=between)


def set_all(machine: Machine, values: numpy.ndarray, fitted: Fitted, rounded: bool = False) -> Machine:
    """Return the machine with the fitted values, given as logarithms."""
    for (setter, _, _), value in zip(fitted.values(), values, strict=True):
        machine = setter(machine, float(f"{math.exp(value):.4g}") if rounded else math.exp(value))
    return machine


def fit(machine: Machine, cases: Sequence[Case], fitted: Fitted, steps: int = 25) -> Machine:
    """Return the machine with the values that fit best, by damped least squares of relative errors.

    Each value is held to what is usual, as if that were one more measurement, since totals alone do not tell all apart.
    """
    usual = numpy.array([math.log(value) for _, value, _ in fitted.values()])
    spread = numpy.array([math.log(factor) for _, _, factor in fitted.values()])

    def residuals(values: numpy.ndarray) -> numpy.ndarray:
        candidate = set_all(machine, values, fitted)
        errors = numpy.array([math.log(case.predict(candidate) / case.seconds) / EXACT for case in cases])
        # Beyond three times what is expected, a row counts less, as one that stands out in its table.
        errors = numpy.sign(errors) * numpy.where(
            abs(errors) < 3, abs(errors), numpy.sqrt(numpy.maximum(6 * abs(errors) - 9, 0))
        )
        return numpy.concatenate([errors, (values - usual) / spread])

    return set_all(machine, _descend(residuals, usual, steps), fitted, rounded=True)


def _descend(residuals: Callable[[numpy.ndarray], numpy.ndarray], start: numpy.ndarray, steps: int) -> numpy.ndarray:
    """Return the values near ``start`` with the least squares of residuals (Levenberg, Marquardt)."""
    values, damping = start, 1.0
    now = residuals(values)
    for _ in range(steps):
        slopes = numpy.stack(
            [(residuals(values + step) - now) / 1e-3 for step in 1e-3 * numpy.eye(len(values))], axis=1
        )
        for _ in range(8):
            matrix = slopes.T @ slopes
            change = numpy.linalg.solve(matrix + damping * numpy.diag(numpy.diag(matrix)), -slopes.T @ now)
            trial = values + numpy.clip(change, -0.5, 0.5)
            after = residuals(trial)
            if after @ after < now @ now:
                break
            damping *= 4
        else:
            break
        done = now @ now - after @ after < 1e-3
        values, now, damping = trial, after, damping / 4
        if done:
            break
    return values


def errors_of(machine: Machine, cases: Sequence[Case]) -> list[tuple[float, Case]]:
    """Return the relative error of each prediction, with its case."""
    return [(case.predict(machine) / case.seconds - 1, case) for case in cases]


def summarize(errors: Sequence[float]) -> dict[str, float]:
    """Return the mean, the median and the 90th percentile of the sizes of relative errors."""
    sizes = numpy.abs(numpy.array(errors))
    return {
        "rows": len(errors),
        "mean": round(float(sizes.mean()), 4),
        "median": round(float(numpy.median(sizes)), 4),
        "90% below": round(float(numpy.quantile(sizes, 0.9)), 4),
        "bias": round(float(numpy.mean(errors)), 4),
    }


def held_out(
    machine: Machine, cases: Sequence[Case], folds: Mapping[str, Callable[[int, Case], bool]], fitted: Fitted = FITTED
) -> list[tuple[float, Case]]:
    """Return the errors of each row, predicted by a fit on the rows of the other folds."""
    found: list[tuple[float, Case]] = []
    for belongs in folds.values():
        left_out = [case for number, case in enumerate(cases) if belongs(number, case)]
        others = [case for number, case in enumerate(cases) if not belongs(number, case)]
        if left_out and others:
            found += errors_of(fit(machine, others, fitted), left_out)
    return found


def halves(seed: int, count: int) -> dict[str, Callable[[int, Case], bool]]:
    """Return two folds, drawn at random."""
    first = set(numpy.random.default_rng(seed).permutation(count)[: count // 2].tolist())
    return {"first": lambda number, _: number in first, "second": lambda number, _: number not in first}


def sizes_of(cases: Sequence[Case]) -> dict[str, Callable[[int, Case], bool]]:
    """Return a fold for each size of a model."""
    models = sorted({case.row["model"] for case in cases})
    return {model: (lambda _, case, model=model: case.row["model"] == model) for model in models}


def describe(error: float, case: Case) -> dict[str, object]:
    """Return a row with its error, for the results."""
    names = ("gpu", "model", "length", "gpus", "micro_batch", "accumulate", "precision", "recompute")
    return {**{name: case.row[name] for name in names}, "error": round(error, 4)}


def load_cases(rows: Sequence[Row], cache: Path | None) -> dict[str, list[Case]]:
    """Return the cases of each GPU, recorded now or read from a folder where an earlier call has put them."""
    cases: dict[str, list[Case]] = {}
    for number, row in enumerate(rows):
        if row["precision"].startswith("fp8"):
            continue
        path = cache / f"{number}.pkl" if cache else None
        if path is not None and path.exists():
            step = pickle.loads(path.read_bytes())
        else:
            step = record_row(row)
            if path is not None:
                path.write_bytes(pickle.dumps(step))
        cases.setdefault(row["gpu"], []).append(make_case(row, step))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", help="a CSV file like published/mpt.csv")
    parser.add_argument("--out", default="machines", help="folder for the profiles and errors.json")
    parser.add_argument("--cache", help="existing folder for recorded steps, only for files of your own")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {}
    together: dict[str, list[tuple[float, Case]]] = {}
    for gpu, cases in load_cases(read_rows(options.rows), options.cache and Path(options.cache)).items():
        machine = start_of(gpu, [case.row for case in cases])
        fitted = fit(machine, cases, FITTED)
        ways = {
            "data sheet × usual shares": errors_of(machine, cases),
            "fitted on these rows": errors_of(fitted, cases),
            "one half held out": held_out(machine, cases, halves(0, len(cases))),
            "whole sizes held out": held_out(machine, cases, sizes_of(cases)),
        }
        summaries = {}
        for way, errors in ways.items():
            together.setdefault(way, []).extend(errors)
            summaries[way] = summarize([error for error, _ in errors])
            print(f"{gpu:10} {way:26} {summaries[way]}")
        found[gpu] = summaries
        half = summaries["one half held out"]
        name = Path(options.rows).name
        source = f"fitted on {len(cases)} rows of {name}, mean error {half['mean']:.1%} on the half held out"
        profile = replace(fitted, source=source, error=half["mean"], error_90=half["90% below"])
        print(f"  {profile}")
        print(f"Written: {profile.save(out / f'{PROFILES[gpu]}.json')}")
    everything = {way: summarize([error for error, _ in errors]) for way, errors in together.items()}
    for way, summary in everything.items():
        print(f"{'all':10} {way:26} {summary}")
    worst = sorted(together["one half held out"], key=lambda pair: -abs(pair[0]))
    rows = [describe(*pair) for pair in worst]
    for row in rows[:15]:
        print(row)
    text = json.dumps({"all": everything, **found, "rows, one half held out": rows}, indent=1)
    print(f"Written: {write_atomic(out / 'errors.json', text)}")


if __name__ == "__main__":
    main()
