"""What progressive resizing saves and costs: a ConvNet that learns letters, tried on fonts that it has not seen.

    python examples/progressive_resizing.py [--epochs 8] [--seeds 3] [--out RESULTS.json]

Letters and digits of 64 × 64 pixels in matplotlib's fonts; every fourth font is held out. One run trains on images of
the full size, others on images that grow from 32 to 64 pixels over a part of the run. The time is that of the process.
"""

import argparse
import functools
import json
import logging
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from letters import SIGNS, read_letters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

SIDE, WIDTH, BATCH = 64, 32, 62


class Reader(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = []
        for before, after in ((3, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, 4 * WIDTH)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * WIDTH, len(SIGNS)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = ft.build_optimizer(self, "adamw", lr=2e-3)
        return ft.build_schedule(optimizer, "cosine", warmup="5%", module=self).to_lightning()


def growing(over):
    return [ft.loaders.ProgressiveResizing(SIDE // 2, SIDE, over=over, grid=8)]


def run(callbacks, train, held, epochs, seed):
    """Seconds of the process, and the share of held-out letters that are read."""
    L.seed_everything(seed, verbose=False)
    module = Reader()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, **quiet)
    began = time.process_time()
    trainer.fit(module, DataLoader(train, BATCH, shuffle=True))
    seconds = time.process_time() - began
    images, labels = held.tensors
    with torch.no_grad():
        right = (module.eval().net(images).argmax(1) == labels).float().mean()
    return seconds, float(right)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images, labels, fonts = read_letters(SIDE, (38, 44, 50))
    is_held = fonts % 4 == 3
    train, held = (TensorDataset(images[rows], labels[rows]) for rows in (~is_held, is_held))
    callbacks = {
        "full size": list,
        **{f"growing over {over}": functools.partial(growing, over) for over in ("50%", "80%")},
    }
    found = {name: [] for name in callbacks}
    for seed in range(options.seeds):  # in turn
        for name, make in callbacks.items():
            found[name].append(run(make(), train, held, options.epochs, seed))
    rows = []
    for name, runs in found.items():
        seconds, right = zip(*runs, strict=True)
        rows.append({"run": name, "seconds": statistics.median(seconds), "accuracy": statistics.mean(right)})
        each = ", ".join(f"{one:.1%}" for one in right)
        print(f"{name:<18}{rows[-1]['seconds']:>7.1f} s{rows[-1]['accuracy']:>8.1%} of unseen fonts read ({each})")
    if options.out is not None:
        command = without_paths(shlex.join(["python", "examples/progressive_resizing.py", *sys.argv[1:]]))
        when = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"hardware": hardware(), "versions": versions(), "date": when, "command": command}
        write_atomic(options.out, json.dumps({**about, "epochs": options.epochs, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
