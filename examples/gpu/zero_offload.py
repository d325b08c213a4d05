"""A model that one card does not hold: ms per step and peak GiB of ZeRO stages 0, 2, 2+offload and 3+offload.

    python examples/gpu/zero_offload.py [--size gpt2-xl] [--card-gib 24] [--batch 4] [--steps 4] [--out RESULTS.json]

Each stage runs in a process of its own, with AdamW and bf16-mixed, on a GPT of the bench; where memory runs out it is
noted and the next stage is tried. The process may use --card-gib of the card's memory, so that a large card shows what
a usual one would do. Beside each peak stands what `predict_model_states` says the states take. Without a GPU it runs a
small size on the CPU, to try the script: there is no peak to be had then.
"""

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fasttrain.bench.gpt import reference_gpt
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import GIB, device_clock, hardware, versions
from lightning_fasttrain.strategy.zero.zero_states import predict_model_states
from lightning_fasttrain.strategy.zero.zero_strategy import ZeROStrategy

STAGES = ("0", "2", "2+offload", "3+offload")
SETTLING = 2


class Repeated(Dataset):
    """The same batch again and again: only time and memory are looked at."""

    def __init__(self, batch, count):
        self.batch, self.count = batch, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.batch


class Clock(L.Callback):
    """Milliseconds from batch to batch, with the device waited for."""

    def __init__(self):
        self.ends, self.peak_bytes = [], None

    def on_train_batch_end(self, trainer, *args):
        self.ends.append(device_clock(trainer.strategy.root_device))
        if trainer.strategy.root_device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()

    @property
    def ms(self):
        times = [1e3 * (b - a) for a, b in zip(self.ends, self.ends[1:], strict=False)]
        return statistics.median(times[SETTLING - 1 :])


def train(size, batch, steps, stage, card_gib):
    """One stage, in this process."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card_gib * GIB / total))
    torch.manual_seed(0)
    specimen = reference_gpt(size, batch)
    module, clock = specimen.module(), Clock()
    row = {"stage": stage, "size": size, "parameters": sum(p.numel() for p in module.parameters())}
    states = predict_model_states(module, world_size=1, precision="bf16-mixed", stages=(stage,))[0]
    row |= {"predicted_device_gib": states.device / GIB, "predicted_host_gib": states.host / GIB}
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        strategy=ZeROStrategy(stage=stage),
        precision="bf16-mixed",
        max_steps=SETTLING + steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(Repeated(specimen.batch(), SETTLING + steps), batch_size=None))
        row |= {"ms": clock.ms, "peak_gib": clock.peak_bytes / GIB if clock.peak_bytes else None, "fits": True}
    except torch.OutOfMemoryError:
        row |= {"ms": None, "peak_gib": None, "fits": False}
    return row


def in_a_process(options, stage):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--stage", stage, "--out", str(out), "--size", options.size]
        command += ["--batch", str(options.batch), "--steps", str(options.steps)]
        command += ["--card-gib", str(options.card_gib)]
        run = subprocess.run(command, stdout=subprocess.DEVNULL)
        if not out.exists():
            sys.exit(f"stage {stage} ended with {run.returncode} and no figures")
        return json.loads(out.read_text())


def show(row):
    cells = [f"{row[key]:10.2f}" if row[key] is not None else " " * 10 for key in ("peak_gib", "ms")]
    states = f"{row['predicted_device_gib']:10.2f} {row['predicted_host_gib']:10.2f}"
    print(f"{row['stage']:<12} {states} {' '.join(cells)}  {'' if row['fits'] else 'out of memory'}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="gpt2-xl" if on_gpu else "nano")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--card-gib", type=float, default=24.0)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--out", default="examples/results/zero_offload_gpu.json" if on_gpu else None)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage is not None:
        row = train(options.size, options.batch, options.steps, options.stage, options.card_gib)
        Path(options.out).write_text(json.dumps(row))
        sys.stdout.flush()
        os._exit(0)  # a process group's destructor can hang
    print(f"{'stage':<12} {'states':>10} {'host':>10} {'peak':>10} {'ms':>10}   GiB; {options.size}")
    about = {
        "hardware": {**hardware(), "gpu": torch.cuda.get_device_name() if on_gpu else None},
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": without_paths(shlex.join(["python", "examples/gpu/zero_offload.py", *sys.argv[1:]])),
        "batch": options.batch,
        "card_gib": options.card_gib if on_gpu else None,
        "rows": [],
    }
    for stage in options.stages.split(","):
        about["rows"].append(in_a_process(options, stage))
        show(about["rows"][-1])
        if options.out is not None:
            write_atomic(options.out, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
