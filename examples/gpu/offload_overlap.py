"""What activation offload costs in time and saves in memory, on a GPU: examples/results/offload_overlap.json

    python examples/gpu/offload_overlap.py [SIZE...] [--batch N] [--steps N] [--out FILE]

For each size of the reference GPT, in bfloat16, with AdamW and without logits in memory: milliseconds per step (the
median) and the CUDA peak of plain training, of offload with and without recomputed blocks, of recomputation alone,
and of torch's own `save_on_cpu`, each also as a ratio to plain. The loss after the last step is the same number, where
it is for plain training that is run again.
A copy that is hidden behind the computation costs no time, so the time ratio shows how well the two overlap.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.autograd.graph import save_on_cpu

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, SIZES
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import GIB, hardware, versions

WARMUP_STEPS = 3  # the first ones pin host memory, which is slow

WAYS = {
    "plain": lambda: ([], nullcontext),
    "plain again": lambda: ([], nullcontext),  # how far two equal runs are apart, here and now
    "offload": lambda: ([ft.ActivationOffload()], nullcontext),
    "checkpointing": lambda: ([ft.ActivationCheckpointing()], nullcontext),
    "offload + checkpointing": lambda: ([ft.ActivationOffload(), ft.ActivationCheckpointing()], nullcontext),
    "torch save_on_cpu": lambda: ([], lambda: save_on_cpu(pin_memory=True)),
}


def measure(size, batch, way, steps):
    """Median ms per step, peak GiB and last loss of one way to train."""
    techniques, context = WAYS[way]()
    torch.manual_seed(0)
    config = SIZES[size].model
    with torch.device("cuda"):
        net = GPT(config).to(torch.bfloat16)
        ids = torch.randint(config.vocabulary, (batch, config.context + 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    with ft.apply(net, techniques), ft.profiling.PeakMemory("cuda") as peak:
        for step in range(-WARMUP_STEPS, steps):
            if step >= 0:
                events[step].record()
            with context():
                loss = ft.linear_cross_entropy(net.hidden(ids[:, :-1]), net.head.weight, ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        events[steps].record()
        torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return {"step_ms": statistics.median(times), "peak_gib": peak.peak_bytes / GIB, "loss": loss.item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", default=["gpt2-small", "gpt2-medium", "gpt2-xl"], metavar="SIZE")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("examples/results/offload_overlap.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure, for on a CPU activations are in host memory already")
    if unknown := set(options.sizes) - set(SIZES):
        sys.exit(f"unknown size {', '.join(sorted(unknown))}: use one of {', '.join(SIZES)}")
    results = []
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_paths(" ".join(["python", "examples/gpu/offload_overlap.py", *sys.argv[1:]])),
        "batch": options.batch,
        "baseline": "plain",
        "results": results,
    }
    for size in options.sizes:
        for way in WAYS:
            found = {"size": size, "way": way, "error": None}
            try:
                found |= measure(size, options.batch, way, options.steps)
            except torch.OutOfMemoryError as error:
                found["error"] = str(error).partition("\n")[0]
            gc.collect()  # a model is in cycles, and would count in the next one's peak
            torch.cuda.empty_cache()
            plain = found if way == "plain" else next(r for r in results if (r["size"], r["way"]) == (size, "plain"))
            if not found["error"] and not plain["error"]:
                found["time_ratio"] = found["step_ms"] / plain["step_ms"]
                found["peak_ratio"] = found["peak_gib"] / plain["peak_gib"]
                found["same_loss"] = found["loss"] == plain["loss"]
            results.append(found)
            shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in found.items()}
            print(*(f"{key}={value}" for key, value in shown.items()), flush=True)
            write_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
