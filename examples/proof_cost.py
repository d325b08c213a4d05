"""What a proof costs: time and memory of ``ft.verify`` and ``ft.proof.Rehearsal`` beside those of one plain step.

    python examples/proof_cost.py [--sizes 82M,350M] [--out FILE]

Each side runs in a process of its own: a GPT-2 in float32 on the CPU, 8 × 128 tokens, with four micro-batches and
recomputation as the techniques. The rehearsal saves with ``ft.AtomicCheckpoints()``, since Lightning's own checkpoints
are put together in memory first. The time is given in plain steps (the median of three after one that warms up), and
the memory is the largest resident set of the process: how far it lies above that of the plain steps, in multiples of
the model's parameters.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT2_VOCABULARY, GPTConfig, GPTModule
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.proof.rehearsal.rehearsal import is_rehearsing

LAYERS_AND_WIDTHS = {"1M": (2, 64), "82M": (6, 768), "350M": (24, 1024)}
CONTEXT, ROWS, STEPS = 128, 8, 4
SIDES = ("plain", "verify", "rehearsal")


class WithValidation(GPTModule):
    """The ladder's GPT with a validation step, as most modules have one."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Clock(L.Callback):
    """The times at which steps ended."""

    def __init__(self):
        self.ends = []

    def on_train_batch_end(self, *_):
        self.ends.append(time.perf_counter())


def build(size):
    layers, width = LAYERS_AND_WIDTHS[size]
    torch.manual_seed(0)
    return WithValidation(GPTConfig(GPT2_VOCABULARY, CONTEXT, layers, width // 64, width))


def batches():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(GPT2_VOCABULARY, (STEPS, ROWS, CONTEXT + 1), generator=generator)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in rows]


def fit(module, callbacks, folder, saves=False):
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = DataLoader(batches(), batch_size=None)
    trainer.fit(module, loader, loader)


class EndAfterRehearsal(L.Callback):
    """Ends a fit before its first step: the callback is listed after the rehearsal."""

    def on_train_start(self, trainer, pl_module):
        self.ended = time.perf_counter()
        trainer.should_stop = not is_rehearsing()  # its own runs get copies of this callback


def run_side(side, size):
    """Seconds of a plain step, or of the whole proof, and the largest resident set in bytes."""
    module, techniques = build(size), [ft.MicroBatching(4), ft.ActivationCheckpointing()]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        if side == "plain":
            clock = Clock()
            fit(module, [clock], folder)
            times = sorted(b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False))
            seconds = times[len(times) // 2]
        elif side == "verify":
            verified = ft.verify(module, batches()[0], techniques, accelerator="cpu")
            seconds = time.perf_counter() - began
            assert verified, str(verified)
        else:
            rehearsal, end = ft.proof.Rehearsal(), EndAfterRehearsal()
            fit(module, [*techniques, ft.AtomicCheckpoints(), rehearsal, end], folder, saves=True)
            seconds = end.ended - began
            assert rehearsal.report.verified
            assert rehearsal.report.resumed_exactly
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak_bytes": peak, "parameter_bytes": nbytes}


def measure(size):
    found = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--sizes", size]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[side] = json.loads(done.stdout.splitlines()[-1])
    plain = found["plain"]
    row = {"size": size, "step_s": plain["seconds"], "step_peak_bytes": plain["peak_bytes"]}
    for side in SIDES[1:]:
        row[f"{side}_steps"] = found[side]["seconds"] / plain["seconds"]
        more = found[side]["peak_bytes"] - plain["peak_bytes"]
        row[f"{side}_more_parameters"] = more / plain["parameter_bytes"]
        row[f"{side}_peak_bytes"] = found[side]["peak_bytes"]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="82M,350M")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="a file for the figures as JSON")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.sizes)))
        return
    rows = []
    for size in options.sizes.split(","):
        row = measure(size)
        rows.append(row)
        print(f"{size}: a plain step takes {row['step_s']:.2f} s and {row['step_peak_bytes'] / 2**30:.2f} GiB")
        for side in SIDES[1:]:
            more = row[f"{side}_more_parameters"]
            print(f"  {side}: the time of {row[f'{side}_steps']:.1f} steps, peak {more:+.2f} × the parameters")
    if options.out:
        command = f"python examples/proof_cost.py --sizes {options.sizes}"
        about = {"date": str(date.today()), "command": command, "hardware": hardware(), "versions": versions()}
        Path(options.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
