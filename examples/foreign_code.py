"""Train other projects' modules, unchanged, without and with our callbacks, and compare the weights.

The rows are the modules in ``foreign_modules.py`` and the settings in ``foreign_settings.py``, the columns the
techniques below, in float64 where a setting has no precision of its own: what is exact must then agree to 1e-6, or be
refused in a sentence. A technique that changes training is held to what it must leave alone. Each cell is "equal" (bit
for bit), a relative difference, a refusal, or a defect.

    python examples/foreign_code.py --out FOREIGN.json
"""

import argparse
import collections
import copy
import datetime
import json
import logging
import re
import shlex
import sys
import tempfile
import time
import warnings
from pathlib import Path

import foreign_modules
import lightning as L
import torch
from foreign_libraries import LIBRARIES, find_libraries
from foreign_modules import MODULES
from foreign_settings import SETTINGS, nano
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.machine import hardware, versions

# Bounds of the relative difference of weights, in float64 and in bf16-mixed; 0.0 is bit for bit. Losses of transformers
# are in float32 even in float64, and the fused one is not. In bf16, Adam's first steps follow the signs of roundings.
EXACT, SUMS = (0.0, 0.0), (1e-6, 0.1)
# How each technique is made, and its bound; None for techniques that change training.
TECHNIQUES = {
    "MicroBatching": (lambda: ft.MicroBatching(2), SUMS),
    "ActivationCheckpointing": (lambda: ft.ActivationCheckpointing(), EXACT),
    "CompileBlocks": (lambda: ft.CompileBlocks(backend="aot_eager"), SUMS),
    "FusedLossHead": (lambda: ft.FusedLossHead(), SUMS),
    "EagerGradientRelease": (lambda: ft.EagerGradientRelease(), EXACT),
    "OptimizerInBackward": (lambda: ft.OptimizerInBackward(), EXACT),
    "AdaptiveClipping": (lambda: ft.optim.AdaptiveClipping(1e9), EXACT),  # nothing is that large
    "FiniteGuard": (lambda: ft.FiniteGuard(), EXACT),
    "SpikeGuard": (lambda: ft.run.SpikeGuard(after=3, far=1e9), EXACT),
    "ExactResume": (lambda: ft.ExactResume(), EXACT),
    "LoRA": (lambda: ft.LoRA(rank=1), None),
    "several": (lambda: [ft.FiniteGuard(), ft.ActivationCheckpointing(), ft.EagerGradientRelease()], EXACT),
}


def modules():
    """Name → module and data; the real ones of libraries that are installed, and layouts written after the others."""
    found = dict(MODULES)
    for package in find_libraries()[0]:
        found.update(LIBRARIES[package])
    return found


class SaveInTheMiddle(L.Callback):
    """Save one checkpoint between two steps of the first epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def build(name):
    """A module and its data, the same each time and without dropout, which micro-batches draw in another order."""
    make, data = modules()[name] if isinstance(name, str) else (name, foreign_modules.token_data)
    torch.manual_seed(7)
    module = make()
    for part in module.modules():
        for name in ("p", "dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module, None if data is None else data()


def train(name, setting, callbacks, folder, resume=None):
    """Train the module from its own script, and return it."""
    module, data = build(name)
    settings = {"precision": "64-true", "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    settings |= {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"default_root_dir": folder, **setting["settings"]}
    if settings["logger"] == "csv":
        settings["logger"] = [L.pytorch.loggers.CSVLogger(folder), L.pytorch.loggers.TensorBoardLogger(folder)]
    trainer = L.Trainer(callbacks=[*setting["callbacks"](), *callbacks], **settings)
    torch.manual_seed(11)
    if setting["tune"] is not None:
        L.pytorch.tuner.Tuner(trainer).lr_find(module, setting["loader"](data), num_training=4, update_attr=False)
        torch.manual_seed(11)
    loaders = {}
    if data is not None:
        validation = DataLoader(data, foreign_modules.BATCH)
        several = setting["settings"].get("num_sanity_val_steps") == 1
        loaders = {"train_dataloaders": setting["loader"](data)}
        if hasattr(type(module), "validation_step") and not several:
            loaders["val_dataloaders"] = validation
    trainer.fit(module, **loaders, ckpt_path=resume, weights_only=False if resume else None)
    assert trainer.global_step > 0
    return module


def distance(expected, found):
    """The largest difference of two state dicts, relative to the largest entry of its tensor."""
    if expected.keys() != found.keys():
        return float("inf")
    gaps = [0.0]
    for name, tensor in expected.items():
        # Weights that stay as small as their updates would be compared with rounding.
        size = max(tensor.double().abs().max().item(), 1e-3)
        gaps.append((tensor.double() - found[name].double()).abs().max().item() / size)
    return max(gaps)


def left_behind(module):
    """What callbacks left on a module after the run."""
    return [name for name, part in module.named_modules() if "forward" in vars(part) or "training_step" in vars(part)]


def refusal(error):
    """The sentence of an error that states what, why and a way out; None for any other."""
    ours = isinstance(error, ValueError | TypeError | RuntimeError) and re.search(r": .+\. .+", str(error), re.DOTALL)
    return str(error) if ours and "Traceback" not in str(error) else None


def cell(name, setting, technique, plain, folder):
    """Train once more, with a technique, and say how the weights compare with those of the plain run."""
    make, bound = TECHNIQUES[technique]
    made = make()
    made = made if isinstance(made, list) else [made]
    try:
        if technique == "ExactResume" and not setting["settings"].get("fast_dev_run"):
            path = folder / f"{time.monotonic_ns()}.ckpt"
            train(name, setting, [*made, SaveInTheMiddle(path)], folder)
            made = [make()]
            if not path.exists():
                return "no checkpoint: the run is too short"
            module = train(name, setting, made, folder, path)
        else:
            module = train(name, setting, made, folder)
    except Exception as error:
        said = refusal(error)
        return f"refused: {said}" if said else f"DEFECT: {type(error).__name__}: {str(error)[:400]}"
    found = module.state_dict()
    if bound is None:
        kept = {key.replace(".base_layer", ""): value for key, value in found.items() if ".lora_" not in key}
        trained = any(".lora_B" in key and value.any() for key, value in found.items())
        initial = build(name)[0].state_dict()
        same = all(torch.equal(value.to(initial[key]), initial[key]) for key, value in kept.items() if key in initial)
        return "trains its adapter alone" if same and trained else "DEFECT: the base changed, or nothing trained"
    if left := left_behind(module):  # an adapter stays in the model
        return f"DEFECT: left on {left[:3]}"
    gap = distance(plain, found)
    limit = bound[setting["settings"].get("precision") == "bf16-mixed"]
    if gap > limit:
        return f"DEFECT: differs by {gap:.2g}"
    return "equal" if gap == 0 else f"{gap:.1e}"


def rows():
    """Name of each row → its module and setting."""
    found = {name: (name, nano()) for name in modules()}
    found.update({f"nanoGPT, {name}": (setting["module"], setting) for name, setting in SETTINGS.items()})
    return found


def product(wanted, techniques, folder, tell=lambda *_: None):
    """Return name of the row → name of the technique → what came of it."""
    found = {}
    for row in wanted:
        name, setting = rows()[row]
        plain = copy.deepcopy(train(name, setting, [], folder).state_dict())
        found[row] = {technique: cell(name, setting, technique, plain, folder) for technique in techniques}
        tell(row, found[row])
    return found


def summarize(found):
    counts = collections.Counter()
    for value in (value for row in found.values() for value in row.values()):
        kinds = ("equal", "refused", "DEFECT", "trains", "no checkpoint")
        counts[next((kind for kind in kinds if value.startswith(kind)), "within the bound")] += 1
    return dict(counts)


def quiet():
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fasttrain"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="of these, by a pattern")
    parser.add_argument("--techniques", help="of these, by a pattern")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    quiet()
    wanted = [row for row in rows() if re.search(options.rows or "", row)]
    techniques = [name for name in TECHNIQUES if re.search(options.techniques or "", name)]
    with tempfile.TemporaryDirectory() as folder:
        found = product(wanted, techniques, Path(folder), lambda row, cells: print(row, json.dumps(cells), flush=True))
    installed, missing = find_libraries()
    if missing:
        print(f"skipped, not installed: pip install --no-deps {' '.join(missing)}")
    report = {
        "hardware": hardware(),
        "versions": versions() | installed,
        "skipped": missing,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cells": summarize(found),
        "rows": found,
    }
    print(json.dumps(report["cells"]))
    if options.out is not None:
        write_atomic(options.out, json.dumps(report, indent=1) + "\n")
    return int("DEFECT" in report["cells"])


if __name__ == "__main__":
    sys.exit(main())
