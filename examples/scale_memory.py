"""Memory of one rank at 2 to 1,024 ranks: predicted, and measured on 2 and 4 processes with gloo.

    python examples/scale_memory.py [--models GPT,Llama] [--out RESULTS.json]

The prediction runs the code of FSDP2 on one process, for rank 0; ZeRO's states are formulas. Measured is the smallest
of three steps of a Fabric loop, by PeakMemory, on the rank that needs most; under FSDP2 with collectives in place, as
NCCL's are, since gloo copies what it gathers and reduces.
"""

import argparse
import functools
import gc
import itertools
import json
import multiprocessing
import os
import shlex
import socket
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import reference_models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_fasttrain as ft
from lightning_fasttrain.bench import GPTConfig, GPTModule
from lightning_fasttrain.bench.gpt import Specimen
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

WORLDS, MEASURED = (2, 4, 8, 64, 1024), (2, 4)
STEPS = 3  # measured, after two others
BATCH, LENGTH, WIDTH = 2, 64, 512
# Label → (precision, maker of the Trainer's strategy, of Fabric's)
WAYS = {
    "FSDP2": ("32-true", ft.FSDP2Strategy, ft.strategy.FabricFSDP2Strategy),
    "FSDP2, bf16-mixed": ("bf16-mixed", ft.FSDP2Strategy, ft.strategy.FabricFSDP2Strategy),
    "FSDP2, tensor groups of 2": (
        "32-true",
        functools.partial(ft.FSDP2Strategy, tensor_parallel=2),
        functools.partial(ft.strategy.FabricFSDP2Strategy, tensor_parallel=2),
    ),
}
for stage in (1, 2, 3):
    makers = (functools.partial(ft.ZeROStrategy, stage), functools.partial(ft.strategy.FabricZeROStrategy, stage))
    WAYS[f"ZeRO-{stage}"] = ("32-true", *makers)


def gpt(layers=4):
    """The reference GPT, 13M parameters."""
    config = GPTConfig(vocabulary=512, context=LENGTH, layers=layers, heads=8, width=WIDTH)
    return Specimen(lambda: GPTModule(config), lambda: tuple(torch.zeros(2, BATCH, LENGTH, dtype=torch.long)))


def llama(layers=4):
    """A Llama of Hugging Face, 16M parameters."""
    return reference_models.llama(layers, WIDTH, BATCH, LENGTH, vocabulary=512)


MODELS = {"GPT": gpt, "Llama": llama}


class InPlaceCollectives(TorchDispatchMode):
    """Gathers and reduces without copies, as NCCL does, where gloo copies the complete tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func not in (torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default):
            return func(*args, **(kwargs or {}))
        output, sent, group, *rest = args
        ranks = dist.ProcessGroup.unbox(group)
        if func is torch.ops.c10d._allgather_base_.default:
            for number, part in enumerate(output.view(ranks.size(), -1)):
                if number == ranks.rank():
                    part.copy_(sent.view(-1))
                dist.broadcast(part, group=ranks, group_src=number)
        else:
            torch.ops.c10d.allreduce_([sent], group, rest[0], None, False, -1)[1].wait()
            output.view(-1).copy_(sent.view(ranks.size(), -1)[ranks.rank()])
        # The same on a few bytes, for what it returns.
        few = torch.zeros(ranks.size())
        small = (few, few[:1]) if func is torch.ops.c10d._allgather_base_.default else (few[:1], few)
        return output, func(*small, group, *rest)[1]


def predict(specimen, way, world):
    precision, make, _ = WAYS[way]
    report = ft.predict_memory(
        specimen.module, specimen.batch(), precision=precision, device="cpu", strategy=make(), world=world
    )
    return report.peak_bytes


def measure(rank, world, name, way, folder):
    """Measure a way on one of ``world`` processes, and write the bytes to ``folder``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "scale"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    precision, _, make = WAYS[way]
    Path(folder, f"{rank}").write_text(str(peak_of(MODELS[name](), make(), precision, world)))
    dist.barrier()
    time.sleep(1)
    os._exit(0)  # gloo's destructor can hang


def peak_of(specimen, strategy, precision, world):
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision)
    fabric.launch()
    module, batch = specimen.module(), specimen.batch()
    zero = isinstance(strategy, ft.strategy.FabricZeROStrategy)
    if zero:
        model, optimizer = fabric.setup(module, module.configure_optimizers())
    else:
        model = fabric.setup_module(module)
        register_fsdp_forward_method(module, "loss")  # gathers the root, as the Trainer's strategy does for a step
        optimizer = fabric.setup_optimizers(module.configure_optimizers())
    model.mark_forward_method("loss")

    def step():
        with fabric.autocast():  # Fabric does not enable it for marked methods of a model that it has not wrapped
            loss = model.loss(batch)
        if not zero:  # DeepSpeed does so in its step
            optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()

    step()
    step()
    peaks = []
    for _ in range(STEPS):
        gc.collect()
        held = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        with nullcontext() if zero else InPlaceCollectives(), ft.profiling.PeakMemory("cpu", held) as peak:
            del held
            step()
        peaks.append(peak.peak_bytes)
    # Gloo's threads now and then hold the gradients of a block after they are reduced, which adds to a step's peak.
    return min(peaks)


def measured_bytes(name, way, world):
    """Return the most of any rank, on ``world`` processes; forks, so that nothing of another way is counted."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=measure, args=(rank, world, name, way, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return max(int(Path(folder, f"{rank}").read_text()) for rank in range(world))


def as_lines(rows):
    """Return the table of the results: MiB, with the error where it was measured."""
    header = [f"{world:,} ranks" for world in WORLDS]
    lines = [f"| | {' | '.join(header)} |", "| --- |" + " --- |" * len(WORLDS)]
    by_way = {}
    for row in rows:
        by_way.setdefault((row["model"], row["way"]), {})[row["world"]] = row
    for (model, way), found in by_way.items():
        cells = []
        for world in WORLDS:
            row = found[world]
            error = f", {row['predicted_bytes'] / row['measured_bytes'] - 1:+.1%}" if row["measured_bytes"] else ""
            cells.append(f"{row['predicted_bytes'] / 2**20:.1f}{error}")
        lines.append(f"| {model}, {way} | {' | '.join(cells)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    names = options.models.split(",")
    measured = {}
    # First, since a fork must not inherit the threads of the predictions.
    for name, way, world in itertools.product(names, WAYS, MEASURED):
        measured[name, way, world] = measured_bytes(name, way, world)
        print(name, way, world, measured[name, way, world], flush=True)
    rows = []
    for name in names:
        specimen = MODELS[name]()
        for way, world in itertools.product(WAYS, WORLDS):
            row = {"model": name, "way": way, "world": world, "predicted_bytes": predict(specimen, way, world)}
            row["measured_bytes"] = measured.get((name, way, world))
            rows.append(row)
            print(row, flush=True)
    errors = [abs(r["predicted_bytes"] / r["measured_bytes"] - 1) for r in rows if r["measured_bytes"]]
    print(f"largest error {max(errors):.1%}")
    if options.out is not None:
        about = {
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": without_paths(shlex.join(["python", "examples/scale_memory.py", *sys.argv[1:]])),
        }
        write_atomic(options.out, json.dumps({**about, "largest_error": max(errors), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
