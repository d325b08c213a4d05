"""The critical batch size of a small GPT on real text, measured as it trains, beside the law of Kaplan et al.

    python examples/critical_batch_size.py [--steps 1600] [--out RESULTS.json]

Each step has eight texts in four micro-batches, whose gradients are compared. The loss, in nats per byte, and the
noise scale are moving averages over about fifty steps. The last two columns say what a step of 512 bytes costs beside
the best batch: how many times the fewest possible steps, and how many times the least possible data.
"""

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench import batches, encode_text, read_text
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

CONFIG = GPTConfig(context=64, layers=2, heads=4, width=64)
TEXTS, MICRO_BATCHES, DECAY = 8, 4, 0.98
HEAD = ("step", "loss", "noise scale, bytes", "Kaplan et al., bytes", "steps", "data")


class Table(L.Callback):
    """Notes loss and noise scale at steps 100, 200, 400, and so on."""

    def __init__(self, noise):
        self.noise, self.rows, self.loss = noise, [], None

    def on_train_batch_end(self, trainer, pl_module, outputs: Any, batch, batch_idx):
        loss, step = float(outputs["loss"]), trainer.global_step
        self.loss = loss if self.loss is None else DECAY * self.loss + (1 - DECAY) * loss
        hundreds, rest = divmod(step, 100)
        if rest == 0 and hundreds & (hundreds - 1) == 0:
            tokens = self.noise.tokens
            costs = ft.estimate.cost_of_batch_size(TEXTS * CONFIG.context, tokens)
            row = (step, self.loss, tokens, ft.estimate.critical_batch_tokens(self.loss), *costs)
            self.rows.append(dict(zip(HEAD, row, strict=True)))


def train(steps):
    torch.manual_seed(0)
    noise = ft.profiling.GradientNoiseScale(every_n_steps=1, decay=DECAY)
    table = Table(noise)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[noise, ft.MicroBatching(MICRO_BATCHES), table],
    )
    tokens = encode_text(read_text(max_mib=2), "bytes", 256)
    trainer.fit(GPTModule(CONFIG), batches(tokens, CONFIG.context, TEXTS, steps))
    return table.rows


def as_cells(row):
    step, loss, noise, law, *costs = row.values()
    return [f"{step:,}", f"{loss:.2f}", f"{noise:,.0f}", f"{law:,.0f}", *(f"{cost:.2f} ×" for cost in costs)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    rows = train(options.steps)
    for cells in [HEAD, *map(as_cells, rows)]:
        print("  ".join(f"{cell:>20}" for cell in cells))
    if options.out is not None:
        found = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", "examples/critical_batch_size.py", *sys.argv[1:]])),
            "rows": rows,
        }
        write_atomic(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
