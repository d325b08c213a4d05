"""Pauses of Python's garbage collector in a training: as it comes, and with GarbageCollection().

    python examples/garbage_collection.py [--steps 400] [--rounds 3] [--out RESULTS.json]

A GPT of 12 narrow blocks, recomputed in four micro-batches, in Lightning's Trainer: its steps are bound by Python, as
those of a larger model on a fast GPU are. Both kinds run in turn, each run in a process of its own. For each kind: the
mean, median and longest time of a step after the first 20, by the wall clock, and the share of collections in them.
"""

import argparse
import datetime
import gc
import json
import logging
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

WARMUP = 20
KINDS = ("as it comes", "GarbageCollection")


class Clock(L.Callback):
    """The time of each step, and of the collections since the last one."""

    def __init__(self):
        self.steps_ms, self.collecting_ms = [], 0.0
        gc.callbacks.append(self.note_collection)

    def note_collection(self, phase, info):
        if phase == "start":
            self.began = time.perf_counter()
        else:
            self.collecting_ms += 1e3 * (time.perf_counter() - self.began)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter()
        if batch_idx + 1 == WARMUP:
            self.collecting_ms = 0.0
        if batch_idx >= WARMUP:
            self.steps_ms.append(1e3 * (now - self.since))
        self.since = now


def train(kind, steps):
    """Return the figures of one run, in this process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 65))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    clock = Clock()
    callbacks = [ft.MicroBatching(4), ft.ActivationCheckpointing(), ft.EagerGradientRelease(), clock]
    if kind == "GarbageCollection":
        callbacks.append(ft.guards.GarbageCollection())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", max_steps=WARMUP + steps, callbacks=callbacks, enable_model_summary=False, **quiet
    )
    module = GPTModule(GPTConfig(context=64, layers=12, heads=2, width=32))
    trainer.fit(module, DataLoader([batch] * (WARMUP + steps), batch_size=None))
    times = clock.steps_ms
    return {
        "mean_ms": statistics.fmean(times),
        "median_ms": statistics.median(times),
        "longest_ms": max(times),
        "share_of_collections": clock.collecting_ms / sum(times),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)  # one run, in this process
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(train(options.kind, options.steps)))
        return
    runs = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind, found in runs.items():
            command = [sys.executable, __file__, "--kind", kind, "--steps", str(options.steps)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(printed.splitlines()[-1]))
    rows = []
    for kind, found in runs.items():
        row = {"kind": kind} | {name: statistics.median(run[name] for run in found) for name in found[0]}
        rows.append(row)
        print(
            f"{kind:<18} mean {row['mean_ms']:.1f} ms, median {row['median_ms']:.1f} ms, longest "
            f"{row['longest_ms']:.0f} ms, collections {row['share_of_collections']:.1%} of the time"
        )
    if options.out:
        about = {"hardware": hardware(), "versions": versions(), "rounds": options.rounds, "steps": options.steps}
        about["command"] = shlex.join(["python", "examples/garbage_collection.py", *sys.argv[1:]])
        about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_atomic(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
