"""The loss without the logits, on a GPU: peak memory and time of each backend beside cross-entropy of the logits.

    python examples/gpu/chunked_loss.py [--tokens 8192] [--width 4096] [--out examples/results/chunked_loss_gpu.json]

One forward and backward of head and loss, in bfloat16, for vocabularies of 32k and 128k. Memory is what is added to
the hidden states and the weight; both kinds of program need the two gradients, so these are given too. Times are
medians. A backend that is not there, as Liger without `pip install lightning-fasttrain[liger]`, is shown as such.
"""

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench.machine import hardware, package_version, versions

VOCABULARIES = (32_768, 131_072)
BACKENDS = ("plain", "chunked", "torch", "liger")
MIB = 2**20


def loss_of(backend, hidden, weight, targets):
    if backend == "plain":
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)
    return ft.linear_cross_entropy(hidden, weight, targets, backend=backend)


def measure(backend, tokens, width, classes, device, steps=10):
    """Added MiB, median ms and the loss, of one forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, width, device=device) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(classes, (tokens,), device=device)

    def step():
        hidden.grad = weight.grad = None
        loss = loss_of(backend, hidden, weight, targets)
        loss.backward()
        return loss.detach()

    step()  # kernels are compiled and chosen
    hidden.grad = weight.grad = None
    with ft.PeakMemory(device, hidden, weight, targets) as peak:
        loss = step()
    times_ms = []
    for _ in range(steps):
        _wait(device)
        started = time.perf_counter()
        step()
        _wait(device)
        times_ms.append(1e3 * (time.perf_counter() - started))
    return {
        "added_mib": peak.added_bytes / MIB,
        "gradients_mib": (hidden.nbytes + weight.nbytes) / MIB,
        "step_ms": statistics.median(times_ms),
        "loss": loss.item(),
    }


def _wait(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def compare(tokens, width, device, vocabularies=VOCABULARIES):
    rows = []
    for classes in vocabularies:
        plain = None
        for backend in BACKENDS:
            row = {"vocabulary": classes, "backend": backend, "error": None}
            try:
                row |= measure(backend, tokens, width, classes, device)
            except (ValueError, ModuleNotFoundError, torch.OutOfMemoryError) as error:
                row["error"] = str(error).splitlines()[0]
            if backend == "plain" and row["error"] is None:
                plain = row
            if plain is not None and row["error"] is None:
                row["memory_ratio"] = row["added_mib"] / plain["added_mib"]
                row["time_ratio"] = row["step_ms"] / plain["step_ms"]
            rows.append(row)
            print(describe(row), flush=True)
    return rows


def describe(row):
    name = f"{row['vocabulary']:>8,} {row['backend']:8}"
    if row["error"] is not None:
        return f"{name} {row['error']}"
    ratios = f"×{row['memory_ratio']:.2f} memory, ×{row['time_ratio']:.2f} time" if "memory_ratio" in row else ""
    return f"{name} {row['added_mib']:9,.0f} MiB {row['step_ms']:8.1f} ms  loss {row['loss']:.4f}  {ratios}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("examples/results/chunked_loss_gpu.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    rows = compare(arguments.tokens, arguments.width, "cuda")
    report = {
        "hardware": hardware(),
        "versions": {**versions(), "cuda": torch.version.cuda, "liger-kernel": package_version("liger-kernel")},
        "command": shlex.join(["python", "examples/gpu/chunked_loss.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tokens": arguments.tokens,
        "width": arguments.width,
        "dtype": "bfloat16",
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
