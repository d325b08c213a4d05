"""What our techniques cost when there is nothing to gain: plain Trainer against Trainer with all that need no surgery.

    python examples/overhead.py [--steps 500] [--turns 7] [--out RESULTS.json]

The step is almost empty (one 32 × 32 layer), so it is all Trainer, and ours can only lose. The kinds of run take turns
within one process; a ratio is that of the times of a turn, with its interval of 95%, of milliseconds of CPU time per
step without setup and warm-up. The µs are what counts for you: they do not grow with the model. As many callbacks
without any method show what Lightning itself takes to call ours. Each technique also runs alone, and the most expensive
comes first; guards, which read each gradient, are measured apart. Then follow a step that waits 20 ms, as for a GPU,
and one of a GPT of 12 narrow blocks in four recomputed parts on one thread, in which Python takes nearly all of the
time: plain, with PyTorch's checkpoint in place of ours, with compiled blocks, and with all blocks compiled as one.
These two have a tenth of the steps.
"""

import argparse
import datetime
import functools
import json
import logging
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.planner.timing import compare_times

WARMUP_STEPS = 50
BUSY_MS = 20
NARROW = GPTConfig(vocabulary=64, context=8, layers=12, heads=2, width=16)


class AlmostNothing(L.LightningModule):
    def __init__(self, busy_ms=0):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.busy_s = busy_ms / 1000

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if self.busy_s:
            time.sleep(self.busy_s)
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


def almost_nothing(steps, busy_ms=0):
    """The model, and batches for so many steps."""
    rows = 8 * steps
    return AlmostNothing(busy_ms), DataLoader(TensorDataset(torch.randn(rows, 32), torch.randn(rows, 32)), batch_size=8)


def narrow_gpt(steps):
    tokens = torch.randint(NARROW.vocabulary, (4 * steps, NARROW.context))
    return GPTModule(NARROW, fused=True), DataLoader(TensorDataset(tokens, tokens), batch_size=4)


class Stopwatch(L.Callback):
    """Seconds from the end of the warm-up to the end of the last step, by a clock."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == WARMUP_STEPS:
            self.started = self.clock()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended = self.clock()


def techniques():
    return [
        ft.MicroBatching(1),
        ft.TokenWeightedAccumulation(1),
        ft.DevicePrefetch(),
        ft.EagerGradientRelease(),
        ft.FusedClipping(),
        ft.model.MatmulPrecision("tf32"),
        ft.StepMeter(),
        ft.MemoryMeter(),
    ]


def guards():
    return [ft.FiniteGuard(), ft.guards.SpikeGuard()]


def recomputed(*more):
    return [ft.MicroBatching(4), ft.ActivationCheckpointing(), ft.EagerGradientRelease(), *more]


class TorchCheckpoint(L.Callback):
    """What the blocks are recomputed by without this package."""

    def setup(self, trainer, pl_module, stage):
        for block in pl_module.gpt.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def ms_per_step(callbacks, steps, folder, make, clock):
    torch.manual_seed(0)
    module, loader = make(steps + WARMUP_STEPS)
    watch = Stopwatch(clock)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[*callbacks, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader)
    return (watch.ended - watch.started) / steps * 1000


def measure(kinds, steps, turns, make=almost_nothing, clock=time.process_time):
    """Name → ms per step of each kind of run in each turn; a kind makes a fresh list of callbacks."""
    times = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for name, callbacks in kinds.items():
                times[name].append(ms_per_step(callbacks(), steps, folder, make, clock))
    return times


def compare(times):
    """Print and return what each kind of run takes beside the first, the most expensive first."""
    base, *others = times
    rows = []
    for name in others:
        ratio = compare_times(times[base], times[name])
        us = 1000 * statistics.median(ms - plain for ms, plain in zip(times[name], times[base], strict=True))
        rows.append({"kind": name, "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "us": us})
    rows.sort(key=lambda row: -row["us"])
    print(f"{base}: {statistics.median(times[base]):.3f} ms a step")
    for row in rows:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        print(f"  {row['kind']:<28} ×{row['ratio']:.3f} ({interval})   {row['us']:+.0f} µs a step", flush=True)
    return rows


def compare_narrow_gpts(steps, turns):
    """Name → median ms of CPU time per step."""
    kinds = {
        "not compiled": recomputed,
        "PyTorch's checkpoint": lambda: [ft.MicroBatching(4), ft.EagerGradientRelease(), TorchCheckpoint()],
        "compiled blocks": lambda: recomputed(ft.CompileBlocks()),
        "blocks compiled as one": lambda: recomputed(ft.CompileBlocks(blocks="gpt")),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = measure(kinds, steps, turns, narrow_gpt)
    finally:
        torch.set_num_threads(threads)
    compare(times)
    return {name: statistics.median(of_turns) for name, of_turns in times.items()}


def us_of_reading(loss, repetitions=2000):
    """Median µs of reading what a loss is divided by."""
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        ft.micro_batching.read_normalizers(loss)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def measure_reading():
    """Print and return the median µs of reading the normalizer of one micro-batch, by loss."""
    scores, labels = torch.randn(8, 32, requires_grad=True), torch.arange(8)
    losses = {
        "one mean": scores.square().mean(),
        "cross_entropy": nn.functional.cross_entropy(scores, labels),
        "label smoothing": nn.functional.cross_entropy(scores, labels, label_smoothing=0.1),
    }
    found = {name: us_of_reading(loss) for name, loss in losses.items()}
    for name, us in found.items():
        print(f"reading the normalizer of {name:<16} {us:.1f} µs a micro-batch")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    kinds = {
        "plain Trainer": list,
        "all techniques": techniques,
        "as many empty callbacks": lambda: [L.Callback() for _ in techniques()],
        "all techniques and guards": lambda: techniques() + guards(),
    }
    both = dict(list(kinds.items())[:2])
    for place, technique in enumerate(techniques()):
        kinds[type(technique).__name__] = lambda place=place: [techniques()[place]]
    for place, guard in enumerate(guards()):
        kinds[type(guard).__name__] = lambda place=place: [guards()[place]]
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "command": without_paths(shlex.join(["python", *sys.argv])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "empty_step": compare(measure(kinds, options.steps, options.turns)),
        "reading_us": measure_reading(),
    }
    print(f"a step that waits {BUSY_MS} ms:")
    few, wait = max(1, options.steps // 10), functools.partial(almost_nothing, busy_ms=BUSY_MS)
    report["busy_step"] = compare(
        measure(both, few, options.turns, wait, time.perf_counter)
    )  # waiting takes no CPU time
    print("a GPT of 12 narrow blocks in four recomputed parts, on one thread:")
    report["narrow_gpt"] = compare_narrow_gpts(few, options.turns)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
