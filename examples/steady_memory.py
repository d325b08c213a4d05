"""Whether 20,000 steps with every guard on leave memory, open files and threads as they were, in all three hosts.

    python examples/steady_memory.py [--steps 20000] [--out RESULTS.json]

The Trainer, the mixin and a Fabric loop train the same small network at the same time, each in a process of its own.
After each hundredth step the process's resident memory, open files and threads are read. The slope is that of a
straight line through the memory after the warm-up, which is the first fifth; its interval is that of the slopes of ten
pieces of it. The control leaks 2 KiB a step, which must be found.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import logging
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import hardware, versions

HOSTS = ("Trainer", "mixin", "Fabric", "control")
EVERY = 100
SAVE_EVERY = 500


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch):
        loss = self.net(batch[0]).sub(batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20_000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithMixin(ft.FastTrainMixin, Net):
    pass


def loader():
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(4096, 32, generator=generator), torch.randn(4096, 1, generator=generator))
    return DataLoader(data, batch_size=8, shuffle=True)


class Readings:
    """The memory, open files and threads of this process, and the time, after each hundredth step."""

    def __init__(self):
        self.rows = []

    def read(self, step):
        if step % EVERY == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(os.listdir("/proc/self/fd"))
            self.rows.append([step, pages * os.sysconf("SC_PAGESIZE"), files, threading.active_count(), time.time()])


class Reader(L.Callback):
    def __init__(self, readings, leak=0):
        self.readings, self.leak, self.leaked = readings, leak, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.leak:
            self.leaked.append(bytearray(os.urandom(self.leak)))
        self.readings.read(trainer.global_step)


def guards(folder):
    return [
        ft.ExactResume(),
        ft.AtomicCheckpoints(background=True),
        ft.Preemption(folder),
        ft.FiniteGuard(),
        ft.guards.SpikeGuard(far=1000.0),
        ft.guards.HangWatch(),
        ft.loaders.SampleGuard(),
        ft.StepMeter(),
        ft.MemoryMeter(),
        ft.profiling.MemoryTimeline(Path(folder) / "timeline"),
        ft.profiling.GradientNoiseScale(),
        ft.MicroBatching(2),
        ft.FusedClipping(),
    ]


def run_trainer(host, steps, folder, readings):
    module, techniques = Net(), guards(folder)
    if host == "mixin":
        module = WithMixin()
        module.techniques, techniques = techniques, []
    elif host == "control":
        techniques = []
    writer = ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[*techniques, writer, Reader(readings, leak=2048 if host == "control" else 0)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())


def run_fabric(steps, folder, readings):
    io = ft.checkpoint.BackgroundCheckpointIO(ft.checkpoint.AtomicCheckpointIO())
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[io])
    fabric.launch()
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    finite, steady = ft.guards.FiniteSteps(), ft.guards.SteadySteps(far=1000.0)
    finite.guard_(optimizer, module)
    steady.guard_(optimizer)
    net, optimizer = fabric.setup(module.net, optimizer)
    batches = ft.checkpoint.resumable(ft.loaders.guard_samples(loader(), 0))
    timer, step = ft.profiling.StepTimer("cpu"), 0

    def loss_of(batch):
        loss = net(batch[0]).sub(batch[1]).square().mean()
        finite.note_loss(loss)
        steady.note_loss(loss)
        return loss

    with ft.guards.PreemptionFlag() as flag, ft.guards.ProgressWatch() as watch:
        while step < steps:
            for batch in batches:
                watch.begin_step()
                ft.accumulate_gradients(loss_of, batch, n=2, backward=fabric.backward)
                fabric.clip_gradients(net, optimizer, max_norm=1.0)
                watch.beat("optimizer step")
                with timer.phase("optimizer"):
                    optimizer.step()
                optimizer.zero_grad()
                timer.end_step(samples=len(batch[0]))
                step += 1
                readings.read(step)
                if step % SAVE_EVERY == 0:
                    state = {"net": net, "optimizer": optimizer, "loader": batches.state_dict()}
                    fabric.save(Path(folder) / "last.ckpt", {**state, "random": ft.checkpoint.random_state()})
                if flag.should_stop() or step == steps:
                    break
    io.wait()


def measure(host, steps):
    """The readings of one host, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    readings = Readings()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        if host == "Fabric":
            run_fabric(steps, folder, readings)
        else:
            run_trainer(host, steps, folder, readings)
    return readings.rows


def slope(rows):
    """Bytes a step, by least squares."""
    return statistics.linear_regression([row[0] for row in rows], [row[1] for row in rows]).slope


def summarize(host, rows):
    """What is left after the warm-up."""
    steady = rows[len(rows) // 5 :]
    size = max(2, len(steady) // 10)
    pieces = sorted(slope(steady[start : start + size]) for start in range(0, len(steady) - size + 1, size))
    quarter = len(steady) // 4
    ms = [1000 * (b[4] - a[4]) / EVERY for a, b in itertools.pairwise(steady)]
    return {
        "host": host,
        "steps": rows[-1][0],
        "bytes_per_step": slope(steady),
        "pieces_low": pieces[0],
        "pieces_high": pieces[-1],
        "resident_mib_after_warmup": steady[0][1] / 2**20,
        "resident_mib_at_end": steady[-1][1] / 2**20,
        "open_files": sorted({row[2] for row in steady}),
        "threads": sorted({row[3] for row in steady}),
        "ms_per_step_first_quarter": statistics.median(ms[:quarter]),
        "ms_per_step_last_quarter": statistics.median(ms[-quarter:]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--hosts", default=",".join(HOSTS), help="of these")
    parser.add_argument("--alone", choices=HOSTS, help="one of them, in this process; prints its readings")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.alone, options.steps)))
        return
    command = [sys.executable, __file__, "--steps", str(options.steps), "--alone"]
    started = {
        host: subprocess.Popen([*command, host], stdout=subprocess.PIPE, text=True) for host in options.hosts.split(",")
    }
    results = []
    for host, process in started.items():
        said, _ = process.communicate()
        assert process.returncode == 0, f"{host} failed, see above"
        results.append(summarize(host, json.loads(said.splitlines()[-1])))
        print(json.dumps(results[-1]), flush=True)
    if options.out is not None:
        report = {
            "hardware": hardware(),
            "versions": versions(),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
