"""Where the time of a step goes: in the kernels of the device, or in the host that launches them.

    python examples/gpu/step_profile.py [--model gpt2] [--sides ours-lean,ours-lean-graphs] [--out FILE]
    python examples/gpu/step_profile.py --picture FILE    # FILE.png: each side's kernels by kind, beside the roofline

The sides are those of examples/against.py, in one process, one after another. For each: milliseconds of a step, how
many of them the host took until it had launched everything (both of the fastest of six), and from one more step, which
is profiled, the number of kernels, the sum of their times, and that of each kind, with the names that take longest.
Where the host takes the whole step, the device waits.
"""

import argparse
import json
import logging
import re
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1]))
from proof_report import data_sheet_tflops
from rivals import SHAPES, SIDES, build_loader, build_model

from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.device import GIB, device_clock, fast_mixed_precision, hardware, versions
from lightning_fasttrain.memory import count_flops

WARMUP, TIMED, NAMED = 4, 6, 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class StepProfile(L.Callback):
    """Times the steps after the warm-up, waiting for the device around each, and profiles the last one."""

    steps = WARMUP + TIMED + 1

    def __init__(self):
        self.step, self.host_ms, self.step_ms, self.kernels = 0, [], [], {}

    def on_train_batch_start(self, *_):
        if self.step == self.steps - 1:
            self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profile.start()
        self.started = device_clock(torch.device(DEVICE))

    def on_train_batch_end(self, *_):
        host = time.perf_counter() - self.started
        whole = device_clock(torch.device(DEVICE)) - self.started
        if WARMUP <= self.step < WARMUP + TIMED:
            self.host_ms.append(1000 * host)
            self.step_ms.append(1000 * whole)
        self.step += 1
        if self.step == self.steps:
            self.profile.stop()
            self.kernels = list_kernels(self.profile)


# The first pattern that is found in a kernel's name tells its kind.
KINDS = {
    "attention": r"flash|fmha|attention|sdpa|softmax_warp",
    "products": r"gemm|nvjet|cutlass|xmma|wgmma|splitk|cublas|_mm_",
    "optimizer": r"multi_tensor_apply|adam|foreach",
    "copies": r"memcpy|memset",
    "sums and norms": r"triton_(red|per)_|reduce|norm|softmax",
    "element-wise": r"triton_poi_|elementwise|vectorized|unrolled|copy|fill|index|gather|scatter",
}


def kind_of(kernel):
    """Tell the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def list_kernels(profile):
    """Name of each kernel → its calls and milliseconds; the range that an optimizer's step annotates is none."""
    found = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer."):
            calls, ms = found.get(event.name, (0, 0.0))
            found[event.name] = calls + 1, ms + event.device_time / 1000
    return found


def sum_kinds(kernels):
    """Milliseconds by kind, the longest first."""
    sums = Counter()
    for name, (_, ms) in kernels.items():
        sums[kind_of(name)] += ms
    return dict(sums.most_common())


def draw(report, path):
    """Draw each side's step: its kernels by kind, what the host needs, and how long products alone would take."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["kernels"]]
    figure = Figure(figsize=(8, 1.9 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(rows):
        began = 0.0
        for colour, kind in enumerate(["products", *(kind for kind in KINDS if kind != "products"), "other"]):
            ms = row["kinds"].get(kind, 0.0)
            axes.barh(height, ms, left=began, color=f"C{colour}", label=None if height else kind)
            began += ms
        for what, line in {"step": "-", "host": ":"}.items():
            where = [row[f"{what}_ms"]] * 2
            axes.plot(where, [height - 0.4, height + 0.4], line, color="black", label=None if height else what)
    if report["products_ms"] is not None:
        axes.axvline(report["products_ms"], color="grey", label="products and attention at the data sheet's speed")
    axes.set(yticks=range(len(rows)), yticklabels=[SIDES[row["side"]].title for row in rows], xlabel="ms of a step")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    write_atomic(path, lambda stream: figure.savefig(stream, format="png", dpi=100))


def products_ms(options):
    """Milliseconds of a step's products and attention, counted whole, at the data sheet's speed; None if unknown."""
    tflops = data_sheet_tflops(torch.cuda.get_device_name()) if DEVICE == "cuda" else None
    if tflops is None or options.precision == "32-true":
        return None
    model, batch = build_model(options), next(iter(build_loader(options)))
    return count_flops(model, batch, loss=lambda model, batch: model(**batch).loss) / tflops / 1e9


def measure(side, options):
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = StepProfile()
    SIDES[side].train(options, found)
    row = {"side": side, "step_ms": min(found.step_ms), "host_ms": min(found.host_ms)}
    row["kernels"] = sum(calls for calls, _ in found.kernels.values())
    row["kernel_ms"] = sum(ms for _, ms in found.kernels.values())
    row["kinds"] = sum_kinds(found.kernels)
    longest = sorted(found.kernels.items(), key=lambda kernel: -kernel[1][1])[:NAMED]
    row["longest"] = [{"name": name[:120], "kind": kind_of(name), "calls": n, "ms": ms} for name, (n, ms) in longest]
    return row | {"peak_gib": torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="gpt2", choices=SHAPES)
    for name in SHAPES["gpt2"]:
        parser.add_argument(f"--{name}", type=int, help="default: the model's own")
    parser.add_argument("--sides", default="ours-fast,ours-lean,ours-lean-graphs,ours-lean-in-one")
    parser.add_argument("--tokens", type=Path, help="token ids, an .npy file; default: bytes of Python's own source")
    parser.add_argument("--out", type=Path, default=Path("step_profile.json"))
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what is in such a file, and end")
    options = parser.parse_args()
    if options.picture is not None:
        draw(json.loads(options.picture.read_text()), options.picture.with_suffix(".png"))
        return
    for side in options.sides.split(","):
        one_of("side", side, [name for name, side in SIDES.items() if "hf" not in name and name != "loop"])
    for name, value in SHAPES[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.device, options.steps = DEVICE, StepProfile.steps
    options.precision = fast_mixed_precision(torch.device(DEVICE)) or "32-true"
    for name in ("lightning", "lightning.pytorch", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    report = {"hardware": hardware(), "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    report["command"] = without_paths(" ".join(["python", "examples/gpu/step_profile.py", *sys.argv[1:]]))
    report |= {"products_ms": products_ms(options), "rows": []}
    for side in options.sides.split(","):
        report["rows"].append(measure(side, options))
        print(", ".join(f"{key} {value}" for key, value in report["rows"][-1].items()), flush=True)
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
