"""What products in 8 bits buy in time, and what they do to the loss: plain bfloat16 beside float8 and int8.

    python examples/gpu/low_precision.py [--size gpt2-xl] [--batch N] [--steps N] [--out FILE]
    python examples/gpu/low_precision.py --width 4096 --heads 32 --layers 8      # the width of a model of 7B

The reference GPT in bfloat16 with AdamW and without logits in memory, as it comes and with compiled blocks. Every way
begins at the same weights and sees the same batch. Milliseconds per step (the median), the peak, and the losses.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, SIZES
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import GIB

WARMUP_STEPS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ways(least):
    """Name → the techniques of each way, the baseline first."""
    found = {}
    for compiled in ("", " compiled"):
        for kind in ("bf16", "float8", "int8"):
            techniques = [] if kind == "bf16" else [ft.model.LowPrecisionProducts(kind, min_features=least)]
            found[kind + compiled] = techniques + ([ft.CompileBlocks()] if compiled else [])
    return found


def measure(config, batch, techniques, steps):
    """Median ms per step, peak GiB, and the losses."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device(DEVICE):
        net = GPT(config).to(torch.bfloat16)
        ids = torch.randint(config.vocabulary, (batch, config.context + 1))
    times, losses = [], []
    with ft.apply(net, techniques):
        # At a higher rate rounding alone drives the losses apart.
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
        for step in range(-WARMUP_STEPS, steps):
            if step == 0 and DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            loss = ft.linear_cross_entropy(net.hidden(ids[:, :-1]), net.head.weight, ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # which waits for the device
            if step >= 0:
                times.append(1000 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() / GIB if DEVICE.type == "cuda" else None
    return {"step_ms": statistics.median(times), "peak_gib": peak, "losses": losses}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="gpt2-xl", choices=SIZES)
    for part in ("layers", "width", "heads"):
        parser.add_argument(f"--{part}", type=int, help="default: that of the size")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--least", type=int, default=1024, help="layers with fewer inputs or outputs are left")
    parser.add_argument("--ways", help="these only: A,B")
    parser.add_argument("--out", type=Path, default=Path("low_precision.json"))
    options = parser.parse_args()
    chosen = options.ways.split(",") if options.ways else None
    config = SIZES[options.size].model
    other = {part: getattr(options, part) for part in ("layers", "width", "heads")}
    config = replace(config, **{part: value for part, value in other.items() if value is not None})
    rows = []
    for way, techniques in ways(options.least).items():
        if chosen is not None and way not in chosen:
            continue
        row = {"way": way, "error": None}
        try:
            row |= measure(config, options.batch, techniques, options.steps)
        except (torch.OutOfMemoryError, ValueError) as error:  # a device without such units
            row["error"] = str(error).partition("\n")[0]
        rows.append(row)
        base = rows[0]
        if row["error"] is None and base["error"] is None:
            row["time_ratio"] = row["step_ms"] / base["step_ms"]
            row["loss_difference"] = max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True))
        print(*(f"{key}={value}" for key, value in row.items() if key != "losses"), flush=True)
        write_atomic(options.out, json.dumps({"model": asdict(config), "batch": options.batch, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
