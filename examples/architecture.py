"""Techniques that change the architecture, beside the same model without: loss and time of a step, on real text.

    python examples/architecture.py [--steps 80] [--out RESULTS.json]

Three comparisons, each from the same weights, on the same batches, step by step in turn: a small GPT from the
beginning; a dense GPT that was trained before and is trained further, as it is and as sparse experts; and a
convolutional network with biases before BatchNorm. The training loss is the mean of the last twenty steps, the held-out
loss that of text that is not trained on, in evaluation. Times are medians of processor time in one thread, to which
other programs on the machine do not add, and ratios those to the first row of a comparison.
"""

import argparse
import copy
import json
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain import architecture
from lightning_fasttrain.bench import batches, encode_text, read_text
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

CONFIG = GPTConfig(context=128, layers=6, heads=4, width=128)
BATCH = 4


class ConvBlock(nn.Module):
    """A causal convolution with a bias, which BatchNorm removes again."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 5), nn.BatchNorm1d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(F.pad(x, (4, 0)))))


class ConvLM(nn.Module):
    """A language model of convolutions."""

    def __init__(self, width=128, layers=6):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*[ConvBlock(width) for _ in range(layers)])
        self.head = nn.Linear(width, 256)

    def loss(self, batch):
        inputs, targets = batch
        hidden = self.blocks(self.embed(inputs).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Side:
    """One model of a comparison, with an optimizer of its own."""

    def __init__(self, name, net, change=None, lr=1e-3):
        self.name, self.net = name, net
        torch.manual_seed(1)
        if change is not None:
            change(net)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        self.losses, self.times_ms = [], []

    def step(self, batch):
        self.net.train()
        started = time.process_time()
        self.optimizer.zero_grad()
        loss = self.net.loss(batch)
        architecture.add_auxiliary_gradient(loss, self.net).backward()
        self.optimizer.step()
        self.times_ms.append(1e3 * (time.process_time() - started))
        self.losses.append(loss.item())

    @torch.no_grad()
    def held_out(self, loader):
        self.net.eval()
        return statistics.mean(self.net.loss(batch).item() for batch in loader)


def use(*techniques):
    return lambda net: ft.apply(net, techniques)


def draw_all_with_one_spread(net):
    """Undo GPT-2's rule, which the reference GPT follows."""
    for name in architecture.init_residual_(net, "gpt2"):
        nn.init.normal_(net.get_parameter(name), std=0.02)


def from_the_beginning():
    changes = {
        "plain": None,
        "StochasticDepth(0.2)": use(architecture.StochasticDepth(0.2)),
        "StochasticDepth(0.2, mode='batch')": use(architecture.StochasticDepth(0.2, mode="batch")),
        "MixtureOfDepths(0.125)": use(architecture.MixtureOfDepths(0.125)),
        "MixtureOfDepths(0.5)": use(architecture.MixtureOfDepths(0.5)),
        "init_residual_(net, 'zero')": lambda net: architecture.init_residual_(net, "zero"),
        "one standard deviation for all": draw_all_with_one_spread,
    }
    torch.manual_seed(0)
    net = GPTModule(CONFIG)
    return [Side(name, copy.deepcopy(net), change) for name, change in changes.items()]


def trained_further(dense):
    changes = {
        "dense": None,
        "Upcycling(4, top_k=1)": use(architecture.Upcycling(4, top_k=1)),
        "Upcycling(4, top_k=2)": use(architecture.Upcycling(4, top_k=2)),
    }
    return [Side(name, copy.deepcopy(dense), change, lr=5e-4) for name, change in changes.items()]


def convolutional():
    torch.manual_seed(0)
    net = ConvLM()
    changes = {"with biases": None, "DropBiasBeforeNorm": use(architecture.DropBiasBeforeNorm())}
    return [Side(name, copy.deepcopy(net), change) for name, change in changes.items()]


def compare(title, sides, train, held_out):
    """Train the sides in turn, print their rows, and return these."""
    for batch in train:
        for side in sides:
            side.step(batch)
    rows = []
    for side in sides:
        row = {"comparison": title, "side": side.name, "step_ms": statistics.median(side.times_ms)}
        row |= {"loss": statistics.mean(side.losses[-20:]), "held_out_loss": side.held_out(held_out)}
        row["parameters"] = sum(parameter.numel() for parameter in side.net.parameters())
        rows.append({**row, "time_ratio": row["step_ms"] / (rows[0] if rows else row)["step_ms"]})
        print(describe(rows[-1]), flush=True)
    return rows


def describe(row):
    losses = f"loss {row['loss']:.3f}, held out {row['held_out_loss']:.3f}"
    times = f"{row['step_ms']:.0f} ms, ×{row['time_ratio']:.2f}"
    return f"{row['comparison']:<20} {row['side']:<36} {losses}, {times}, {row['parameters'] / 1e6:.2f}M parameters"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = encode_text(read_text(max_mib=4), "bytes", 256)
    cut = len(tokens) * 9 // 10
    first, second = (batches(tokens[:cut], CONFIG.context, BATCH, options.steps, seed=seed) for seed in (0, 1))
    held_out = list(batches(tokens[cut:], CONFIG.context, 8, 8, seed=2))
    begun = from_the_beginning()
    rows = compare("from the beginning", begun, first, held_out)
    rows += compare("trained further", trained_further(begun[0].net), second, held_out)
    rows += compare("convolutions", convolutional(), first, held_out)
    if options.out is not None:
        found = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", "examples/architecture.py", *sys.argv[1:]])),
            "steps": options.steps,
            "tokens_per_step": BATCH * CONFIG.context,
            "rows": rows,
        }
        write_atomic(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
