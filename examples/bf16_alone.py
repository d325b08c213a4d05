"""What training in bfloat16 alone loses, and what updates="kahan" and "stochastic" give back: a small GPT on real text.

    python examples/bf16_alone.py [--steps 200] [--out RESULTS.json]

All four runs begin with the same weights and see the same batches. The last loss is the mean of twenty steps, the
mean that of all; the state is what the optimizer keeps beside weights and gradients, in bytes for each number that
trains.
"""

import argparse
import functools
import json
import shlex
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench import batches, encode_text, read_text
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

CONFIG = GPTConfig(context=64, layers=2, heads=4, width=64)
RUNS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, kahan": (torch.bfloat16, "kahan"),
    "bfloat16, stochastic": (torch.bfloat16, "stochastic"),
}


@functools.cache
def read_tokens():
    """The same for every run."""
    return encode_text(read_text(max_mib=2), "bytes", 256)


def train(name="adamw", steps=200, dtype=torch.float32, lr=1e-4, **settings):
    """The losses, and bytes of optimizer state for each number that trains."""
    torch.manual_seed(0)
    net = GPTModule(CONFIG).to(dtype)
    optimizer = ft.build_optimizer(net, name, lr=lr, **settings)
    losses = []
    for batch in batches(read_tokens(), CONFIG.context, 8, steps):
        optimizer.zero_grad()
        loss = net.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    numbers = sum(parameter.numel() for parameter in net.parameters())
    return losses, ft.optim.optimizer_state_bytes(optimizer) / numbers


def show(rows, script, steps, out):
    """Print the rows, and leave them in a file if one is wanted."""
    print(f"{'':<24}{'last loss':>10}{'mean loss':>10}{'state bytes':>14}")
    found_rows = []
    for name, (losses, state) in rows.items():
        last, mean = statistics.mean(losses[-20:]), statistics.mean(losses)
        print(f"{name:<24}{last:>10.4f}{mean:>10.4f}{state:>14.2f}")
        found_rows.append({"run": name, "last_loss": last, "mean_loss": mean, "state_bytes": state})
    if out is not None:
        found = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", f"examples/{script}.py", *sys.argv[1:]])),
            "steps": steps,
            "rows": found_rows,
        }
        write_atomic(out, json.dumps(found, indent=1) + "\n")


def main(runs, script):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    rows = {name: train(steps=options.steps, **settings) for name, settings in runs.items()}
    show(rows, script, options.steps, options.out)


if __name__ == "__main__":
    main({name: {"dtype": dtype, "updates": how} for name, (dtype, how) in RUNS.items()}, "bf16_alone")
