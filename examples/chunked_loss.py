"""The loss without the logits: peak memory and time of each way beside cross-entropy of the logits.

    python examples/chunked_loss.py [--tokens 8192] [--width 4096] [--ways plain,compiled,chunked] [--out RESULTS.json]

One forward and backward of head and loss, in mixed precision with products in bfloat16 and the loss in float32, or all
in float32, which is faster on a processor without units for bfloat16: plain, plain compiled by torch.compile, ours,
ours with compiled code between its products, and the other back ends. Memory is what is added to the hidden states and
the weight; all need the two gradients, so these are given too. The ways take turns; times are medians, and their ratios
are to the faster of the first two. A way that is not there is shown as such, as is Liger without
``pip install lightning-fasttrain[liger]``. On a GPU it runs there.
"""

import argparse
import datetime
import json
import shlex
import statistics
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import fast_mixed_precision, hardware, package_version, time_ms, versions

WAYS = ("plain", "compiled", "chunked", "chunked-compiled", "torch", "liger")
MIB = 2**20


def plain(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def loss_by(way):
    if way == "plain":
        return plain
    if way == "compiled":
        return torch.compile(plain)
    backend = "compiled" if way == "chunked-compiled" else way
    return lambda *tensors: ft.linear_cross_entropy(*tensors, backend=backend)


class Side:
    """One way, with tensors of its own."""

    def __init__(self, way, tokens, width, classes, device, precision):
        torch.manual_seed(0)
        self.way, self.device, self.loss_of = way, device, loss_by(way)
        self.mixed = precision == "bf16-mixed"
        self.hidden = torch.randn(tokens, width, device=device, requires_grad=True)
        self.weight = (torch.randn(classes, width, device=device) / width**0.5).requires_grad_()
        self.targets = torch.randint(classes, (tokens,), device=device)
        self.times_ms = []

    def step(self):
        self.hidden.grad = self.weight.grad = None
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            loss = self.loss_of(self.hidden, self.weight, self.targets)
        loss.backward()
        return loss.detach()

    def measure_memory(self):
        """Once; before it, kernels are compiled and chosen."""
        self.step()
        self.hidden.grad = self.weight.grad = None
        with ft.profiling.PeakMemory(self.device, self.hidden, self.weight, self.targets) as peak:
            loss = self.step()
        gradients = self.hidden.nbytes + self.weight.nbytes
        return {"added_mib": peak.added_bytes / MIB, "gradients_mib": gradients / MIB, "loss": loss.item()}

    def measure_time(self):
        self.times_ms.append(time_ms(torch.device(self.device), self.step))


def compare(tokens, width, classes, device, precision, rounds, ways):
    rows, sides = [], []
    for way in ways:
        row = {"vocabulary": classes, "way": way, "error": None}
        rows.append(row)
        try:
            side = Side(way, tokens, width, classes, device, precision)
            row |= side.measure_memory()
            sides.append((row, side))
        except (ValueError, RuntimeError, ModuleNotFoundError) as error:  # out of memory, or no compiler
            row["error"] = str(error).splitlines()[0]
    for _ in range(rounds):
        for _, side in sides:
            side.measure_time()
    for row, side in sides:
        row["step_ms"] = statistics.median(side.times_ms)
    rivals = [row for row in rows if row["way"] in ("plain", "compiled") and row["error"] is None]
    for row, _ in sides if rivals else ():
        row["time_ratio"] = row["step_ms"] / min(rival["step_ms"] for rival in rivals)
        row["memory_ratio"] = row["added_mib"] / min(rival["added_mib"] for rival in rivals)
    return rows


def describe(row):
    name = f"{row['vocabulary']:>8,} {row['way']:16}"
    if row["error"] is not None:
        return f"{name} {row['error']}"
    ratios = f"×{row['memory_ratio']:.2f} memory, ×{row['time_ratio']:.2f} time" if "memory_ratio" in row else ""
    return f"{name} {row['added_mib']:9,.0f} MiB {row['step_ms']:8.1f} ms  loss {row['loss']:.4f}  {ratios}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096 if on_gpu else 384)
    parser.add_argument("--vocabularies", default="32768,131072" if on_gpu else "16000,128000")
    fast = fast_mixed_precision(torch.device("cuda" if on_gpu else "cpu")) == "bf16-mixed"
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed" if fast else "32-true")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of them; torch's own is slow on a CPU")
    parser.add_argument("--rounds", type=int, default=10 if on_gpu else 5)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    rows = []
    for classes in map(int, options.vocabularies.split(",")):
        size = (options.tokens, options.width, classes, "cuda" if on_gpu else "cpu", options.precision)
        for row in compare(*size, options.rounds, options.ways.split(",")):
            rows.append(row)
            print(describe(row), flush=True)
    if options.out is not None:
        report = {
            "hardware": hardware(),
            "versions": {**versions(), "cuda": torch.version.cuda, "liger-kernel": package_version("liger-kernel")},
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tokens": options.tokens,
            "width": options.width,
            "precision": options.precision,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
