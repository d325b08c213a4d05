"""How good the plan is: beside it an exhaustive search, which runs every choice that there is.

    python examples/plan_against_search.py [--models "GPT,ResNet"] [--out RESULTS.json]

Four small models at three limits each, on the CPU in float32, where every choice is exact. The search runs all choices
in turn, half a second each, twice; the fastest step counts, since whatever else the machine does only adds. A limit
leaves those whose measured peak is within it, and the fastest of these is the best. What the plan chose is then
measured once more in turn with the best, since a machine may be slower than it was minutes before: the plan is as good
as the ratio of the two, with its interval. The same is done for a plan with a profile of the machine, which is measured
before each model. The last line is the worst ratio of all.
"""

import argparse
import json
import shlex
import sys
import time
from datetime import UTC, datetime

import reference_models

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.core.messages import log
from lightning_fasttrain.planner.candidates import find_axes
from lightning_fasttrain.planner.timing import Stopwatch, compare_times
from lightning_fasttrain.step_time import measure_machine
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import facts_of_machine

MODELS = {
    "GPT": reference_models.gpt("nano", batch=4),
    "BERT like MiniLM": reference_models.encoder(layers=6, width=128, batch=8, length=64),
    "ResNet": reference_models.resnet(layers=2, width=16, batch=8, pixels=32),
    "Llama": reference_models.llama(layers=3, width=128, batch=4, length=128, vocabulary=2048),
}
LIMITS = (0.9, 0.6, 0.4)  # of the peak of the plain step
TURNS = 6  # of what was chosen and the best
GIB = 2**30


def search(module, batch, watch):
    """Each choice but those that keep to a limit → the fastest step of two runs in ms, the peak in bytes."""
    axes = find_axes(module, batch, facts_of_machine(), Exactness.EXACT, "32-true", mixed=None)
    found = {choice: watch.time(choice, peak=True) for choice in axes.choices()}
    return {choice: (min(first.ms, watch.time(choice).ms), first.peak_bytes) for choice, first in found.items()}


def compare(name, specimen):
    module, batch = specimen.module(), specimen.batch()
    watch = Stopwatch(module, batch, {"accelerator": "cpu"})
    began = time.monotonic()
    found = search(module, batch, watch)
    searched_s = time.monotonic() - began
    machine = measure_machine("cpu")
    plain = next(peak for choice, (_, peak) in found.items() if not choice.techniques())
    rows = []
    for share in LIMITS:
        limit = share * plain / GIB
        fitting = {choice: ms for choice, (ms, peak) in found.items() if peak <= limit * GIB}
        if not fitting:
            continue
        settings = {"keep": "exact", "precision": "32-true", "device": "cpu", "seconds": 120}
        plan = ft.make_plan(module, batch, limit, **settings)
        profiled = ft.make_plan(module, batch, limit, machine=machine, **settings)
        chosen, of_profile, best = plan.chosen.choice, profiled.chosen.choice, min(fitting, key=fitting.get)
        turns = [[watch.time(one, peak=True) for one in (chosen, of_profile, best)] for _ in range(TURNS)]
        chosen_ms, of_profile_ms, best_ms = ([turn[side].ms for turn in turns] for side in range(3))
        rows.append(
            {
                "model": name,
                "limit_gib": limit,
                "choices": len(found),
                "search_s": searched_s,
                "plan_s": plan.seconds,
                "profiled_s": profiled.seconds,
                "best": str(best),
                "best_ms": min(best_ms),
                "chosen": str(chosen),
                "chosen_ms": min(chosen_ms),
                "ratio": as_list(compare_times(best_ms, chosen_ms)),
                "profiled": str(of_profile),
                "profiled_ms": min(of_profile_ms),
                "profiled_ratio": as_list(compare_times(best_ms, of_profile_ms)),
                "predicted_gib": plan.chosen.predicted_bytes / GIB,
                "measured_gib": max(turn[0].peak_bytes for turn in turns) / GIB,
            }
        )
        print(as_row(rows[-1]), flush=True)
    return rows


def as_list(ratio):
    return [ratio.value, ratio.low, ratio.high]


def as_row(row):
    """One line of the table in the results' README."""
    memory = f"{1024 * row['predicted_gib']:.0f} / {1024 * row['measured_gib']:.0f} of {1024 * row['limit_gib']:.0f}"
    times = f"{row['chosen_ms']:.0f} / {row['best_ms']:.0f}"
    ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in ("ratio", "profiled_ratio")]
    seconds = f"{row['plan_s']:.0f} / {row['profiled_s']:.0f} / {row['search_s']:.0f}"
    chosen = row["chosen"].removeprefix("32-true, ")
    return f"| {' | '.join([row['model'], chosen, memory, times, *ratios, seconds])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between")
    parser.add_argument("--out", metavar="JSON", help="file to write the results to")
    options = parser.parse_args()
    log.setLevel("WARNING")
    rows = []
    for name in options.models.split(","):
        rows += compare(name, MODELS[name])
    if options.out:
        command = without_paths(shlex.join(["python", *sys.argv]))
        date = datetime.now(UTC).date().isoformat()
        result = {"command": command, "date": date, "hardware": hardware(), "versions": versions(), "rows": rows}
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")
    print(f"worst ratio {max(row['ratio'][0] for row in rows):.2f}")


if __name__ == "__main__":
    main()
