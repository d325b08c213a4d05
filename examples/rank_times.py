"""How well predicted step times of several ranks agree with measured ones on this CPU, over gloo.

    python examples/rank_times.py --ranks 2 [--models GPT-2,BERT] [--out RESULTS.json]

The ranks measure the machine and their link first, as ``torchrun ... fasttrain machine`` does. Each strategy then
trains each model for some steps by Lightning's Trainer, and the fastest of the later ones counts. Predictions are made
afterwards, in this process, since a rank of a run cannot predict another run.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from families import families
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.step_time import measure_machine, read_machine

MODELS = ("GPT-2", "Llama", "BERT", "ViT", "ConvNeXtV2")
STRATEGIES = {
    "DDP": lambda: "ddp",
    "FSDP2": ft.FSDP2Strategy,
    "ZeRO-1": lambda: ft.ZeROStrategy(stage=1),
    "ZeRO-2": lambda: ft.ZeROStrategy(stage=2),
    "ZeRO-3": lambda: ft.ZeROStrategy(stage=3),
}
STEPS, WARM_UP = 12, 4


class Clock(L.Callback):
    """Notes when each step ends."""

    def __init__(self):
        self.ends = []

    def on_train_batch_end(self, *_):
        self.ends.append(time.perf_counter())

    def seconds(self):
        return [after - before for before, after in zip(self.ends[WARM_UP:], self.ends[WARM_UP + 1 :], strict=False)]


def measure(specimen, strategy):
    """The seconds of the later steps of a training."""
    torch.manual_seed(0)
    module, batch, clock = specimen.module(), specimen.batch(), Clock()
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        callbacks=[clock],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=None))
    return clock.seconds()


def measure_all(models, out):
    """Write the machine, and the seconds of all steps; what each rank of the launch does."""
    dist.init_process_group("gloo")
    machine, specimens, found = measure_machine("cpu"), families(), {}
    for name in models:
        for label, make in STRATEGIES.items():
            found[f"{name}, {label}"] = measure(specimens[name], make())
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"machine": asdict(machine), "seconds": found}))
    dist.barrier()
    os._exit(0)  # gloo's destructor can hang


def launch(ranks, models):
    """The machine, and the seconds of all steps, as ranks of a launch have found them."""
    with tempfile.TemporaryDirectory() as folder:
        out, profile = Path(folder, "found.json"), Path(folder, "machine.json")
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", __file__]
        subprocess.run([*command, "--models", ",".join(models), "--out", str(out)], check=True)
        found = json.loads(out.read_text())
        profile.write_text(json.dumps(found["machine"]))
        return read_machine(profile), found["seconds"]


def predict(specimen, strategy, ranks, machine):
    settings = {"devices": ranks, "strategy": strategy, "precision": "32-true", "machine": machine}
    return ft.predict_time(specimen.module, specimen.batch(), **settings)


def error_of(row):
    return row["predicted_ms"] / row["measured_ms"] - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    parser.add_argument("--models", default=",".join(MODELS), help="some of those in families.py")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    models = options.models.split(",")
    if "LOCAL_RANK" in os.environ:
        measure_all(models, options.out)
    machine, found = launch(options.ranks, models)
    specimens, rows = families(), []
    for label, seconds in found.items():
        name, _, strategy = label.partition(", ")
        predicted = predict(specimens[name], STRATEGIES[strategy](), options.ranks, machine)
        by_kind = {kind: round(each * 1e3, 1) for kind, each in predicted.by_kind.items() if each}
        row = {"model": name, "strategy": strategy, "measured_ms": round(min(seconds) * 1e3, 1)}
        row["spread"] = round(statistics.median(seconds) / min(seconds) - 1, 3)
        rows.append({**row, "predicted_ms": round(predicted.seconds * 1e3, 1), "by_kind_ms": by_kind})
        times = f"{rows[-1]['predicted_ms']:>9.1f} ms predicted {row['measured_ms']:>9.1f} measured"
        print(f"{name:<12} {strategy:<7} {times} ({row['spread']:.0%}) {error_of(rows[-1]):>+7.1%}", flush=True)
    mean = statistics.fmean(abs(error_of(row)) for row in rows)
    print(f"mean error {mean:.1%}")
    if options.out is not None:
        about = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", "examples/rank_times.py", *sys.argv[1:]])),
            "ranks": options.ranks,
            "machine": asdict(machine),
            "mean_error": round(mean, 3),
        }
        write_atomic(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
