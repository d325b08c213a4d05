"""What our techniques cost when there is nothing to gain: plain Trainer against Trainer with all that need no surgery.

    python examples/overhead.py [STEPS] [REPETITIONS]

The step is almost empty (one 32 × 32 layer), so it is all Trainer, and ours can only lose. The kinds of run alternate
within one process; the ratio is that of the medians, of milliseconds per step without setup and warm-up. The µs are
what counts for you: they do not grow with the model. The line after the ratio is a step that waits 20 ms, as for a GPU,
with a tenth of the steps. Before the ratios it prints what reading the normalizer of one micro-batch takes.
"""

import logging
import statistics
import sys
import tempfile
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft

WARMUP_STEPS = 50
BUSY_MS = 20


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


class Stopwatch(L.Callback):
    """Seconds from the end of the warm-up to the end of the last step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == WARMUP_STEPS:
            self.started = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended = time.perf_counter()


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


def ms_per_step(callbacks, steps, folder, busy_ms=0):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * (steps + WARMUP_STEPS), 32), torch.randn(8 * (steps + WARMUP_STEPS), 32))
    watch = Stopwatch()
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
    trainer.fit(AlmostNothing(busy_ms), DataLoader(data, batch_size=8))
    return (watch.ended - watch.started) / steps * 1000


def compare(kinds, steps, repetitions, busy_ms=0):
    """Name → median ms per step of each kind of run; a kind makes a fresh list of callbacks."""
    times = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repetitions):
            for name, make in kinds.items():  # interleaved: what slows the machine down slows all of them
                times[name].append(ms_per_step(make(), steps, folder, busy_ms))
    return {name: statistics.median(found) for name, found in times.items()}


def us_of_reading(loss, repetitions=2000):
    """Median µs of reading what a loss is divided by."""
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        ft.data.read_normalizers(loss)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def print_what_reading_takes():
    scores, labels = torch.randn(8, 32, requires_grad=True), torch.arange(8)
    losses = {
        "one mean": scores.square().mean(),
        "cross_entropy": nn.functional.cross_entropy(scores, labels),
        "label smoothing": nn.functional.cross_entropy(scores, labels, label_smoothing=0.1),
    }
    for name, loss in losses.items():
        print(f"reading the normalizer of {name:<16} {us_of_reading(loss):.1f} µs a micro-batch")


def main(steps=500, repetitions=7):
    for name in ("lightning.pytorch", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    both = {"plain Trainer": list, "all techniques": techniques}
    alone = {type(t).__name__: lambda i=i: [techniques()[i]] for i, t in enumerate(techniques())}
    found = compare(both | alone, steps, repetitions)
    plain = found["plain Trainer"]
    for name, ms in found.items():
        print(f"{name:<26} {ms:.3f} ms/step   ×{ms / plain:.3f}   {1000 * (ms - plain):+.0f} µs")
    print_what_reading_takes()
    print(f"ratio {found['all techniques'] / plain:.3f}: all techniques against plain Trainer")
    busy = compare(both, max(1, steps // 10), repetitions, BUSY_MS)
    print(f"ratio {busy['all techniques'] / busy['plain Trainer']:.3f}: the same where a step waits {BUSY_MS} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
