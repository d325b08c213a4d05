"""How well predicted step times agree with measured ones on this CPU, for models of 16 kinds, trained in several ways.

    python examples/time_prediction.py [--machine HERE.json] [--models GPT-2,BERT] [--rounds 5] [--out RESULTS.json]

The machine is measured before each model, as by ``fasttrain machine``, since other work of its host makes it faster and
slower within minutes. The ways to train a model run in turn, each for two steps of which the second is timed, and each
has the least time of all rounds, since such work only adds time; it varies by as much as the median is above it. A
model's fastest way is named rightly if the way that is predicted to be the fastest is slower than the one that is by no
more than either varies.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from families import KINDS_ON_CUDA, families
from memory_prediction import WAYS, has_blocks, make_step

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.memory.predict_memory import predict_strategies
from lightning_fasttrain.step_time import measure_machine, read_machine
from lightning_fasttrain.step_time.predict_time import recorder_for, simulate_recorded

WAYS_TO_TRAIN = ("plain", "checkpointing", "micro-batches ×4", "bf16-mixed", "fused head")


def predict(specimen, way, machine):
    """The predicted seconds of a step, by kind of time as well."""
    recorder = recorder_for([])
    settings = {"techniques": way.techniques(), "precision": way.precision, "device": "cpu", "recorder": recorder}
    predict_strategies(specimen.module, specimen.batch(), [None], **settings)
    (simulated, _), *_ = simulate_recorded(recorder, machine, tf32=False)
    return simulated


def measure_in_turn(steps, rounds):
    """The seconds of each step in all rounds, after one that is not timed and finds the caches as others left them."""
    taken = [[] for _ in steps]
    for _ in range(rounds):
        for step, seconds in zip(steps, taken, strict=True):
            step()
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    return taken


def list_ways(specimen, machine):
    """The ways to train a model that exist for it, and may be fast here."""
    for name in WAYS_TO_TRAIN:
        way = WAYS[name]
        multiplies_faster = machine.peak_flops["bfloat16"] > machine.peak_flops["float32"]
        if (way.checkpointing and not has_blocks(specimen)) or (way.precision != "32-true" and not multiplies_faster):
            continue
        if way.fuses and not has_fusable_head(specimen):
            continue
        yield name


def has_fusable_head(specimen):
    try:
        ft.fuse_loss_head_(specimen.module())
    except ValueError:
        return False
    return "input_ids" in specimen.batch()  # of a classifier's few logits there is nothing to save


def rows_of(model, specimen, machine, rounds):
    """A row for each way to train a model."""
    names = list(list_ways(specimen, machine))
    steps = []
    for name in names:
        torch.manual_seed(0)
        steps.append(make_step(specimen, "cpu", WAYS[name])[0])
    rows = []
    for name, seconds in zip(names, measure_in_turn(steps, rounds), strict=True):
        predicted = predict(specimen, WAYS[name], machine)
        by_kind = {kind: round(each * 1e3, 2) for kind, each in predicted.by_kind.items() if each}
        spread = statistics.median(seconds) / min(seconds) - 1
        row = {"model": model, "way": name, "measured_ms": round(min(seconds) * 1e3, 2), "spread": round(spread, 3)}
        rows.append({**row, "predicted_ms": round(predicted.seconds * 1e3, 2), "by_kind_ms": by_kind})
    return rows


def error_of(row):
    return row["predicted_ms"] / row["measured_ms"] - 1


def names_the_fastest(rows):
    """Whether the way that is predicted to be the fastest is as fast as the fastest, but for what either varies."""
    named = min(rows, key=lambda row: row["predicted_ms"])
    fastest = min(rows, key=lambda row: row["measured_ms"])
    return named["measured_ms"] <= fastest["measured_ms"] * (1 + max(named["spread"], fastest["spread"]))


def summarize(rows):
    """The mean error, that of each way, and how often the fastest way of a model is named."""
    by_model = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    ways = {}
    for way in WAYS_TO_TRAIN:
        errors = [error_of(row) for row in rows if row["way"] == way]
        if errors:
            ways[way] = {"number": len(errors), "mean": round(statistics.fmean(map(abs, errors)), 3)}
            ways[way]["bias"] = round(statistics.fmean(errors), 3)
    named = [model for model, of_model in by_model.items() if names_the_fastest(of_model)]
    mean = statistics.fmean(abs(error_of(row)) for row in rows)
    return {"mean_error": round(mean, 3), "ways": ways, "fastest_named": len(named), "models": len(by_model)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machine", help="a profile; default: it is measured before each model")
    parser.add_argument("--models", help="some of them, by name; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="in which each way is timed once")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    specimens, machines = families(), {}
    about = {
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_paths(shlex.join(["python", "examples/time_prediction.py", *sys.argv[1:]])),
    }
    rows = []
    print(f"{'ms':<34} {'predicted':>10} {'measured':>10} {'spread':>7} {'error':>7}")
    for model in options.models.split(",") if options.models else KINDS_ON_CUDA:
        machine = measure_machine("cpu") if options.machine is None else read_machine(options.machine)
        machines[model] = asdict(machine)
        of_model = rows_of(model, specimens[model], machine, options.rounds)
        rows += of_model
        for row in of_model:
            times = f"{row['predicted_ms']:>10.1f} {row['measured_ms']:>10.1f} {row['spread']:>7.0%}"
            print(f"{model:<16} {row['way']:<17} {times} {error_of(row):>+7.1%}", flush=True)
        if options.out is not None:
            found = {**about, **summarize(rows), "rows": rows, "machines": machines}
            write_atomic(options.out, json.dumps(found, indent=1) + "\n")
    for name, value in summarize(rows).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
