"""Where the time of a step goes: in the kernels of the device, or in the host that launches them.

    python examples/gpu/step_profile.py [--model gpt2] [--sides ours-lean,ours-lean-graphs] [--out FILE]

The sides are those of examples/against.py, in one process, one after another. For each: milliseconds of a step, how
many of them the host took until it had launched everything (both of the fastest of six), and from one more step, which
is profiled, the number of kernels and the sum of their times. Where the host takes the whole step, the device waits.
"""

import argparse
import json
import logging
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1]))
from rivals import SHAPES, SIDES

from lightning_fasttrain.bench.ladder.preflight import fast_bf16
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.device import GIB, device_clock, hardware, versions

WARMUP, TIMED = 4, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class StepProfile(L.Callback):
    """Times the steps after the warm-up, waiting for the device around each, and profiles the last one."""

    steps = WARMUP + TIMED + 1

    def __init__(self):
        self.step, self.host_ms, self.step_ms, self.kernels = 0, [], [], []

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


def list_kernels(profile):
    """Milliseconds of each kernel; the range that an optimizer's step annotates is none."""
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.device_time / 1000 for event in on_device if not event.name.startswith("Optimizer.")]


def measure(side, options):
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = StepProfile()
    SIDES[side].train(options, found)
    row = {"side": side, "step_ms": min(found.step_ms), "host_ms": min(found.host_ms)}
    row |= {"kernels": len(found.kernels), "kernel_ms": sum(found.kernels)}
    return row | {"peak_gib": torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="gpt2", choices=SHAPES)
    for name in SHAPES["gpt2"]:
        parser.add_argument(f"--{name}", type=int, help="default: the model's own")
    parser.add_argument("--sides", default="ours-fast,ours-lean,ours-lean-graphs,ours-lean-in-one")
    parser.add_argument("--tokens", type=Path, help="token ids, an .npy file; default: bytes of Python's own source")
    parser.add_argument("--out", type=Path, default=Path("step_profile.json"))
    options = parser.parse_args()
    for side in options.sides.split(","):
        one_of("side", side, [name for name, side in SIDES.items() if "hf" not in name and name != "loop"])
    for name, value in SHAPES[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.device, options.steps = DEVICE, StepProfile.steps
    options.precision = "bf16-mixed" if fast_bf16(DEVICE) else "32-true"
    for name in ("lightning", "lightning.pytorch", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    report = {"hardware": hardware(), "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    report["command"] = without_paths(" ".join(["python", "examples/gpu/step_profile.py", *sys.argv[1:]]))
    report["rows"] = []
    for side in options.sides.split(","):
        report["rows"].append(measure(side, options))
        print(", ".join(f"{key} {value}" for key, value in report["rows"][-1].items()), flush=True)
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
