"""How well the predicted peak memory of a training step agrees with the measured one, on the CPU or on CUDA.

    python examples/memory_prediction.py [--families] [--models "GPT nano,ResNet"] [--device cpu] [--out RESULTS.json]

Without more it is the six reference models; with ``--families`` twelve of other kinds, which need the extra finetune.
Where there is a GPU it is two larger models there, held against the allocator's own count.

The prediction runs on tensors without memory, from the function that builds the model; the measurement is of the
third step of the same training, by PeakMemory. The last line is the largest error of all.
"""

import argparse
import gc
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import reference_models
import torch
from lightning.fabric.utilities import move_data_to_device

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.process import without_paths
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.machine import hardware, versions

MODELS = {
    "GPT nano": reference_models.gpt("nano", batch=8),
    "GPT tiny": reference_models.gpt("tiny", batch=2),
    "Llama": reference_models.llama(),
    "BERT": reference_models.encoder(),
    "ResNet": reference_models.resnet(),
    "uneven blocks": reference_models.uneven(),
}
# Large enough that a card's memory is theirs, and not the work space of its libraries.
ON_CUDA = {
    "GPT-2 small": reference_models.gpt("gpt2-small", batch=8),
    "large Llama": reference_models.llama(layers=12, width=1024, batch=8, length=1024, vocabulary=32_000),
}
# name → (checkpointing, micro-batches, precision)
WAYS = {
    "plain": (False, 1, "32-true"),
    "checkpointing": (True, 1, "32-true"),
    "micro-batches ×4": (False, 4, "32-true"),
    "bf16-mixed": (False, 1, "bf16-mixed"),
    "all three": (True, 4, "bf16-mixed"),
}


def predicted_bytes(specimen, device, checkpointing, parts, precision):
    techniques = [ft.MicroBatching(parts), *([ft.ActivationCheckpointing()] if checkpointing else [])]
    report = ft.predict_memory(
        specimen.module, specimen.batch(), techniques=techniques, precision=precision, device=device
    )
    return report.peak_bytes


def measured_bytes(specimen, device, checkpointing, parts, precision):
    module, batch = specimen.module().to(device), move_data_to_device(specimen.batch(), device)
    if checkpointing:
        ft.checkpoint_activations_(module)
    optimizer = module.configure_optimizers()

    def loss_of(part):
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
            return module.loss(part)

    def step():  # as the Trainer does it: gradients of the last step live through the forward of an unsplit batch
        if parts == 1:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
        else:
            optimizer.zero_grad()
            ft.accumulate_gradients(loss_of, batch, parts)
        optimizer.step()

    step()
    step()
    with ft.run.PeakMemory(device, module, optimizer, batch) as peak:
        step()
    return peak.peak_bytes


def has_blocks(specimen):
    try:
        return bool(ft.model.find_blocks(specimen.module()))
    except ValueError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", help="some of them, by name; default: all")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of the ways to train them, by name; default: all")
    parser.add_argument("--families", action="store_true", help="models of other families")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    specimens, chosen = MODELS | ON_CUDA, ON_CUDA if options.device == "cuda" else MODELS
    if options.families:
        from families import FAMILIES

        specimens = chosen = FAMILIES
    about = {
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_paths(shlex.join(["python", "examples/memory_prediction.py", *sys.argv[1:]])),
    }
    rows = []
    print(f"{'MiB':<34} {'predicted':>10} {'measured':>10} {'error':>7}")
    for model in options.models.split(",") if options.models else chosen:
        for row in rows_of(model, specimens[model], options.ways.split(","), options.device):
            rows.append(row)
            largest = max(abs(error_of(row)) for row in rows)
            if options.out is not None:
                found = {**about, "largest_error": largest, "rows": rows}
                write_atomic(options.out, json.dumps(found, indent=1) + "\n")
    print(f"largest error {largest:.1%}")


def rows_of(model, specimen, ways, device):
    """A row for each of these ways to train the model, as it is measured."""
    blocks = has_blocks(specimen)
    for way, settings in WAYS.items():
        if way not in ways or (settings[0] and not blocks):
            continue
        predicted, measured = (of(specimen, device, *settings) for of in (predicted_bytes, measured_bytes))
        gc.collect()  # or what is left of this one counts in the next
        row = {"model": model, "way": way, "predicted_bytes": predicted, "measured_bytes": measured}
        mib = f"{predicted / 2**20:>10.2f} {measured / 2**20:>10.2f}"
        print(f"{model:<16} {way:<17} {mib} {error_of(row):>+7.1%}", flush=True)
        yield row


def error_of(row):
    return row["predicted_bytes"] / row["measured_bytes"] - 1


if __name__ == "__main__":
    main()
