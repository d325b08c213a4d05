"""A budget in GiB on a GPU: the allocator's peak against limit and prediction, for GPT-2 small and XL.

    python examples/gpu/memory_budget.py [--sizes gpt2-small,gpt2-xl] [--batch 8] [--out RESULTS.json]

Each way of training is run for some steps in bf16-mixed: everything kept, every block recomputed, selective, and
budgets between the two peaks. Peaks are the CUDA allocator's; times are medians of single steps, with the device
waited for; both also as ratios to keeping everything. `predict_memory`'s prediction stands beside the first two.
"""

import argparse
import datetime
import gc
import json
import shlex
import statistics
import sys

import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import reference_gpt
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import GIB, hardware, time_ms, versions

SETTLING, TIMED = 6, 6


def train(size, batch, policy):
    """Peak of the last step in bytes, and the median ms of those before it; None where memory ran out."""
    gc.collect()  # the model before this one is in cycles, and would count
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    specimen = reference_gpt(size, batch)
    try:
        with torch.device("cuda"):
            module, data = specimen.module(), [part.cuda() for part in specimen.batch()]
        ft.apply(module, [ft.ActivationCheckpointing(policy)] if policy is not None else [])
        optimizer = module.configure_optimizers()

        def step():
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # as in the Trainer
                loss = module.loss(data)
            optimizer.zero_grad()  # where the Trainer does: the forward still has the step before's gradients
            loss.backward()
            optimizer.step()

        for _ in range(SETTLING):
            step()
        times_ms = [time_ms(torch.device("cuda"), step) for _ in range(TIMED)]
        with ft.profiling.PeakMemory("cuda") as peak:
            step()
        return peak.peak_bytes, statistics.median(times_ms)
    except torch.OutOfMemoryError:
        return None


def predicted_gib(size, batch, techniques):
    specimen = reference_gpt(size, batch)
    report = ft.predict_memory(specimen.module, specimen.batch(), techniques=techniques, precision="bf16-mixed")
    return report.peak_bytes / GIB


def climb(size, batch):
    """A row for each way to train, as it is measured; ratios are to the first."""
    first = measure(size, batch, "everything kept", None, predicted_gib(size, batch, []))
    yield first
    predicted = predicted_gib(size, batch, [ft.ActivationCheckpointing()])
    lowest = measure(size, batch, "every block recomputed", ft.model.EveryBlock(), predicted, first)
    yield lowest
    yield measure(size, batch, "selective", ft.model.SelectiveOps(), None, first)
    highest_gib = first["peak_gib"] or torch.cuda.get_device_properties(0).total_memory / GIB
    for share in (0.0, 0.25, 0.5, 0.75) if lowest["peak_gib"] else ():
        budget = ft.MemoryBudget(lowest["peak_gib"] + share * (highest_gib - lowest["peak_gib"]))
        yield measure(size, batch, f"budget: {share:.0%} of the way", budget, None, first)


def measure(size, batch, way, policy, predicted, first=None):
    measured = train(size, batch, policy)
    plan = getattr(policy, "plan", None)
    row = {"size": size, "way": way, "predicted_gib": plan.predicted_bytes / GIB if plan else predicted}
    row["limit_gib"] = plan.limit_bytes / GIB if plan else None
    row["peak_gib"], row["ms"] = (measured[0] / GIB, measured[1]) if measured else (None, None)
    row["plan"] = str(plan) if plan else None
    kept = row if first is None else first
    for name, key in (("time_ratio", "ms"), ("memory_ratio", "peak_gib")):
        row[name] = row[key] / kept[key] if row[key] and kept[key] else None
    return row


def show(row):
    gib = [row[key] for key in ("peak_gib", "limit_gib", "predicted_gib")]
    cells = " ".join(f"{value:8.2f}" if value is not None else " " * 8 for value in gib)
    ms = row["ms"] or float("nan")
    print(f"{row['size']:<12} {row['way']:<24} {cells}  {ms:8.1f} ms  {row['plan'] or ''}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="gpt2-small,gpt2-xl")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", default="examples/results/budget_gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure. examples/checkpoint_budget.py measures on the CPU.")
    rows = []
    about = {
        "hardware": {**hardware(), "gpu": torch.cuda.get_device_name()},
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": without_paths(shlex.join(["python", "examples/gpu/memory_budget.py", *sys.argv[1:]])),
        "batch": options.batch,
        "rows": rows,
    }
    print(f"{'':<37} {'peak':>8} {'limit':>8} {'predicted':>8}   GiB")
    for size in options.sizes.split(","):
        for row in climb(size, options.batch):
            rows.append(row)
            show(row)
            write_atomic(options.out, json.dumps(about, indent=1) + "\n")
    within = [row["peak_gib"] <= row["limit_gib"] for row in rows if row["limit_gib"] and row["peak_gib"]]
    print(f"peak within the limit: {sum(within)} of {len(within)}. Written: {options.out}")


if __name__ == "__main__":
    main()
