"""How well the predicted peak memory of a training step agrees with the measured one, on the CPU or on CUDA.

    python examples/memory_prediction.py [--families | --cuda] [--models "GPT nano,ResNet"] [--out RESULTS.json]
    python examples/memory_prediction.py --cuda --again examples/results/memory_prediction_cuda.json

Without more it is the six reference models on the CPU; with ``--families`` models of other kinds, which need the extra
finetune. With ``--cuda`` it is larger models of 16 kinds, held against the caching allocator's own count and without
cuDNN, whose workspace is not predicted. The results name the device.

The prediction runs on tensors without memory, from the function that builds the model; the measurement is of the
third step of the same training, by PeakMemory. The last line is the largest error of all. ``--again`` predicts anew
what a file has measured, which needs no GPU.
"""

import argparse
import gc
import json
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import reference_models
import torch
from lightning.fabric.utilities import move_data_to_device

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, package_version, versions

MODELS = {
    "GPT nano": reference_models.gpt("nano", batch=8),
    "GPT tiny": reference_models.gpt("tiny", batch=2),
    "Llama": reference_models.llama(),
    "BERT": reference_models.encoder(),
    "ResNet": reference_models.resnet(),
    "uneven blocks": reference_models.uneven(),
}


@dataclass(frozen=True)
class Way:
    """A way to train a model."""

    checkpointing: bool = False
    parts: int = 1
    precision: str = "32-true"
    releases: bool = False
    fuses: bool = False

    def techniques(self):
        techniques = [ft.MicroBatching(self.parts)]
        if self.fuses:
            techniques.append(ft.FusedLossHead())
        if self.checkpointing:
            techniques.append(ft.ActivationCheckpointing())
        if self.releases:
            techniques.append(ft.EagerGradientRelease())
        return techniques


WAYS = {
    "plain": Way(),
    "checkpointing": Way(checkpointing=True),
    "micro-batches ×4": Way(parts=4),
    "bf16-mixed": Way(precision="bf16-mixed"),
    "all three": Way(True, 4, "bf16-mixed"),
    "lean": Way(True, 4, "bf16-mixed", releases=True),
    "fused head": Way(precision="bf16-mixed", fuses=True),
    "lean + fused head": Way(True, 4, "bf16-mixed", releases=True, fuses=True),
}
NO_GPU = "no GPU: the caching allocator of torch's CUDA build on a driver whose kernels compute nothing"
WAYS_ON_CPU = ("plain", "checkpointing", "micro-batches ×4", "bf16-mixed", "all three")
WAYS_ON_CUDA = ("plain", "bf16-mixed", "checkpointing", "micro-batches ×4", "lean", "fused head", "lean + fused head")


def find_specimens(options):
    if not (options.families or options.cuda):
        return MODELS
    from families import KINDS_ON_CUDA, SIZE_ON_CUDA, families

    if options.cuda:
        return {name: specimen for name, specimen in families(SIZE_ON_CUDA).items() if name in KINDS_ON_CUDA}
    return {name: specimen for name, specimen in families().items() if name not in MODELS}


def find_device():
    """The name of the GPU, or that it is none: a driver may pretend to be one."""
    computes = torch.ones(3, device="cuda").add(1).sum().item() == 6
    return torch.cuda.get_device_name() if computes else NO_GPU


def predict(specimen, device, way):
    return ft.predict_memory(
        specimen.module, specimen.batch(), techniques=way.techniques(), precision=way.precision, device=device
    )


def make_step(specimen, device, way):
    """A training's step as a function, with what of it is in memory."""
    module, batch = specimen.module().to(device), move_data_to_device(specimen.batch(), device)
    if way.checkpointing:
        ft.checkpoint_activations_(module)
    if way.fuses:
        ft.fuse_loss_head_(module)
    optimizer = module.configure_optimizers()

    def loss_of(part):
        with torch.autocast(device, torch.bfloat16, enabled=way.precision == "bf16-mixed", cache_enabled=False):
            return module.loss(part)

    def step():  # as the Trainer does it: gradients of the last step live through the forward of an unsplit batch
        if way.parts == 1:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
        else:
            optimizer.zero_grad()
            # Memory is the same with every weight, and a split that need not be exact can have all of these models.
            ft.accumulate_gradients(loss_of, batch, way.parts, count="samples", check=False, trim_padding=False)
        optimizer.step()
        if way.releases:
            ft.optim.release_gradients_(module.parameters())

    return step, (module, optimizer, batch)


def measure(specimen, device, way):
    """The peak of the third step, in bytes: of what was in use, and on CUDA of what the allocator had reserved."""
    before = empty_cache(device)
    step, held = make_step(specimen, device, way)
    step()
    step()
    with ft.profiling.PeakMemory(device, *held) as peak:
        step()
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return peak.peak_bytes - before, reserved


def empty_cache(device):
    """Give back what an earlier model has left, the workspace of cuBLAS too; return the bytes that are still there."""
    gc.collect()
    if device != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def has_blocks(specimen):
    try:
        return bool(ft.model.find_blocks(specimen.module()))
    except ValueError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", help="some of them, by name; default: all")
    parser.add_argument("--ways", help="some of the ways to train them, by name; default: all")
    parser.add_argument("--families", action="store_true", help="models of other families")
    parser.add_argument("--cuda", action="store_true", help="models of 16 families on a GPU")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict anew what was measured there, and write it")
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    specimens = find_specimens(options)
    if options.again is not None:
        predict_again(options.again, specimens, device)
        return
    chosen = options.models.split(",") if options.models else list(specimens)
    ways = options.ways.split(",") if options.ways else WAYS_ON_CUDA if options.cuda else WAYS_ON_CPU
    if options.cuda:
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_cudnn_sdp(False)
    name = find_device() if options.cuda else "cpu"
    machine = hardware()
    if name == NO_GPU:
        machine |= {"gpu": None, "gpu_memory_gib": None}
    about = {
        "device": name,
        "hardware": machine,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_paths(shlex.join(["python", "examples/memory_prediction.py", *sys.argv[1:]])),
    }
    rows = []
    print(f"{'MiB':<34} {'predicted':>10} {'measured':>10} {'error':>7}")
    for model in chosen:
        for row in rows_of(model, specimens[model], ways, device):
            rows.append(row)
            largest = max(abs(error_of(row)) for row in rows)
            if options.out is not None:
                found = {**about, "largest_error": largest, "rows": rows}
                write_atomic(options.out, json.dumps(found, indent=1) + "\n")
    print(f"largest error {largest:.1%}")


def predict_again(file, specimens, device):
    """Replace the predictions of a file by those of this version; what was measured stays."""
    torch.backends.cudnn.enabled = False  # as where it was measured
    found = json.loads(file.read_text())
    if ("measured_reserved" in found["rows"][0]) != (device == "cuda"):
        raise SystemExit(f"{file} was measured on {found['device']}: --cuda goes with a GPU alone")
    for row in found["rows"]:
        report = predict(specimens[row["model"]], device, WAYS[row["way"]])
        row["predicted_bytes"] = report.peak_bytes
        if device == "cuda":
            row["predicted_reserved"] = report.reserved_bytes
        print(f"{row['model']:<16} {row['way']:<17} {error_of(row):>+7.1%}", flush=True)
    used = {**versions(), "transformers": package_version("transformers")}  # which decides how a model attends
    found["predicted"] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": used}
    found["largest_error"] = max(abs(error_of(row)) for row in found["rows"])
    write_atomic(file, json.dumps(found, indent=1) + "\n")
    print(f"largest error {found['largest_error']:.1%}")


def rows_of(model, specimen, ways, device):
    """A row for each of these ways to train the model, as it is measured."""
    blocks = has_blocks(specimen)
    for name in ways:
        way = WAYS[name]
        if way.checkpointing and not blocks:
            continue
        report = predict(specimen, device, way)
        measured, reserved = measure(specimen, device, way)
        row = {"model": model, "way": name, "predicted_bytes": report.peak_bytes, "measured_bytes": measured}
        if device == "cuda":
            row |= {"predicted_reserved": report.reserved_bytes, "measured_reserved": reserved}
        mib = f"{report.peak_bytes / 2**20:>10.2f} {measured / 2**20:>10.2f}"
        print(f"{model:<16} {name:<17} {mib} {error_of(row):>+7.1%}", flush=True)
        yield row


def error_of(row):
    return row["predicted_bytes"] / row["measured_bytes"] - 1


if __name__ == "__main__":
    main()
