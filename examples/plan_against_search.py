"""How good the plan is: beside it an exhaustive search, which runs every choice that there is.

    python examples/plan_against_search.py [--models "GPT,ResNet"] [--out RESULTS.json]

Four small models at three limits each, on the CPU in float32, where every choice is exact. The search runs all choices
in turn, half a second each, twice; the fastest step counts, since whatever else the machine does only adds. A limit
leaves those whose measured peak is within it. A plan is as good as the time that the search has measured for what it
chose, beside the best time of the search at that limit; the noise is by how much the fastest steps of its two runs
differ. Plans and search run in one process, within minutes. The last line is the worst ratio of all.
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
from lightning_fasttrain.planner.timing import Stopwatch
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import facts_of_machine

MODELS = {
    "GPT": reference_models.gpt("nano", batch=4),
    "BERT like MiniLM": reference_models.encoder(layers=6, width=128, batch=8, length=64),
    "ResNet": reference_models.resnet(layers=2, width=16, batch=8, pixels=32),
    "Llama": reference_models.llama(layers=3, width=128, batch=4, length=128, vocabulary=2048),
}
LIMITS = (0.9, 0.6, 0.4)  # of the peak of the plain step
GIB = 2**30


def search(module, batch):
    """Measure every choice but those that keep to a limit."""
    axes = find_axes(module, batch, facts_of_machine(), Exactness.EXACT, "32-true", mixed=None)
    return measure(Stopwatch(module, batch, {"accelerator": "cpu"}), list(axes.choices()))


def measure(watch, choices):
    """Each choice → the fastest step of each of two runs in ms, the peak in bytes."""
    found = {choice: ([], 0) for choice in choices}
    for round_ in range(2):
        for choice, (times, peak) in found.items():
            timed = watch.time(choice, peak=round_ == 0)
            found[choice] = [*times, timed.ms], max(peak, timed.peak_bytes)
    return found


def compare(name, specimen):
    module, batch = specimen.module(), specimen.batch()
    began = time.monotonic()
    found = search(module, batch)
    searched_s = time.monotonic() - began
    plain = next(peak for choice, (_, peak) in found.items() if not choice.techniques())
    rows = []
    for share in LIMITS:
        limit = share * plain / GIB
        fitting = {choice: min(times) for choice, (times, peak) in found.items() if peak <= limit * GIB}
        if not fitting:
            continue
        plan = ft.make_plan(module, batch, limit, keep="exact", precision="32-true", device="cpu", seconds=120)
        chosen, best = plan.chosen.choice, min(fitting, key=fitting.get)
        if chosen not in found:  # a memory budget for this very limit
            found |= measure(Stopwatch(module, batch, {"accelerator": "cpu"}), [chosen])
        times = found[chosen][0]
        rows.append(
            {
                "model": name,
                "limit_gib": limit,
                "choices": len(found),
                "search_s": searched_s,
                "plan_s": plan.seconds,
                "best": str(best),
                "best_ms": fitting[best],
                "chosen": str(chosen),
                "chosen_ms": min(times),
                "ratio": min(times) / fitting[best],
                "noise": max(times) / min(times) - 1,
                "predicted_gib": plan.chosen.predicted_bytes / GIB,
                "measured_gib": found[chosen][1] / GIB,
            }
        )
        print(as_row(rows[-1]), flush=True)
    return rows


def as_row(row):
    """One line of the table in the results' README."""
    memory = f"{1024 * row['predicted_gib']:.0f} / {1024 * row['measured_gib']:.0f} of {1024 * row['limit_gib']:.0f}"
    times = f"{row['chosen_ms']:.0f} / {row['best_ms']:.0f}"
    ratio = f"{row['ratio']:.2f} ({row['noise']:.0%})"
    seconds = f"{row['plan_s']:.0f} / {row['search_s']:.0f}"
    return f"| {row['model']} | {row['chosen'].removeprefix('32-true, ')} | {memory} | {times} | {ratio} | {seconds} |"


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
    print(f"worst ratio {max(row['ratio'] for row in rows):.2f}")


if __name__ == "__main__":
    main()
