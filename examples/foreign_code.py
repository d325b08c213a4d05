"""Train other projects' modules, unchanged, without and with our callbacks, and compare the weights.

The rows are the modules in ``foreign_libraries.py`` (of libraries that are installed) and ``foreign_modules.py``, and
the settings in ``foreign_settings.py``; the columns are the techniques below, each alone, and then stacks of those that
the row accepts. All runs are in float64 where a setting has no precision of its own: what is exact must then agree to
1e-6, or be refused in a sentence. A technique that changes training is held to what it must leave alone. Each cell is
"equal" (bit for bit), a relative difference, a refusal, or a defect. With ``--verify`` the stacks are also verified.

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

import foreign_libraries
import foreign_modules
import lightning as L
import torch
from foreign_modules import MODULES
from foreign_settings import SETTINGS, nano
from torch.utils.data import DataLoader, default_collate

import lightning_fasttrain as ft
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

# Bounds of the relative difference of weights in float64; 0.0 is bit for bit. Losses of transformers are in float32
# even in float64, and the fused one is not.
EXACT, SUMS = 0.0, 1e-6
# In bf16-mixed, each micro-batch's gradient of a weight is rounded to bfloat16, before float32 sums them, and so are
# the fused loss's hidden states. Adam turns entries that are zero up to rounding into steps of full length, so weights
# say nothing; gradients at the same weights do: either side is off by half an eps at most.
ROUNDED = torch.finfo(torch.bfloat16).eps
# How each technique is made, and its bound; for techniques that change training, what is looked at instead.
TECHNIQUES = {
    "MicroBatching": (lambda: ft.MicroBatching(2), SUMS),
    "ActivationCheckpointing": (lambda: ft.ActivationCheckpointing(), EXACT),
    "SelectiveOps": (lambda: ft.ActivationCheckpointing(ft.model.SelectiveOps()), EXACT),
    "MemoryBudget": (lambda: ft.ActivationCheckpointing(ft.MemoryBudget(budget_gib=1)), EXACT),
    "ActivationOffload": (lambda: ft.ActivationOffload(min_mib=0), EXACT),
    "TiledMLP": (lambda: ft.model.TiledMLP(2), SUMS),
    "PaddingFree": (lambda: ft.micro_batching.PaddingFree(), SUMS),
    "ChannelsLast": (lambda: ft.model.ChannelsLast(), SUMS),
    "AttentionBackend": (lambda: ft.model.AttentionBackend(), SUMS),
    "CompileBlocks": (lambda: ft.CompileBlocks(backend="aot_eager"), SUMS),
    "FusedLossHead": (lambda: ft.FusedLossHead(), SUMS),
    "EagerGradientRelease": (lambda: ft.EagerGradientRelease(), EXACT),
    "OptimizerInBackward": (lambda: ft.OptimizerInBackward(), EXACT),
    "AdaptiveClipping": (lambda: ft.optim.AdaptiveClipping(1e9), EXACT),  # nothing is that large
    "WeightEMA": (lambda: ft.optim.WeightEMA(0.5), EXACT),
    "DevicePrefetch": (lambda: ft.DevicePrefetch(), EXACT),
    "SampleGuard": (lambda: ft.loaders.SampleGuard(), EXACT),
    "GradualUnfreezing": (lambda: ft.finetune.GradualUnfreezing(groups=["*"]), EXACT),  # a single group
    "FiniteGuard": (lambda: ft.FiniteGuard(), EXACT),
    "SpikeGuard": (lambda: ft.guards.SpikeGuard(after=3, far=1e9), EXACT),
    "ExactResume": (lambda: ft.ExactResume(), EXACT),
    "HangWatch": (lambda: ft.guards.HangWatch(), EXACT),
    "GradientNoiseScale": (lambda: ft.profiling.GradientNoiseScale(every_n_steps=1), EXACT),
    "MemoryMeter": (lambda: ft.MemoryMeter(), EXACT),
    "StepMeter": (lambda: ft.StepMeter(), EXACT),
    "LoRA": (lambda: ft.LoRA(rank=1), "adapter"),
    "DoRA": (lambda: ft.LoRA(rank=1, variant="dora"), "adapter"),
    "StochasticDepth": (lambda: ft.architecture.StochasticDepth(0.5), "finite"),
    "MixtureOfDepths": (lambda: ft.architecture.MixtureOfDepths(0.5), "finite"),
    "Upcycling": (lambda: ft.architecture.Upcycling(2), "finite"),
}
# Stacks of techniques; those that a row refuses alone are left out.
STACKS = {
    "guarded": ("FiniteGuard", "ActivationCheckpointing", "EagerGradientRelease", "HangWatch", "WeightEMA"),
    "fast": ("CompileBlocks", "DevicePrefetch", "ChannelsLast", "StepMeter"),
    "lean": ("MicroBatching", "ActivationCheckpointing", "ActivationOffload", "FusedLossHead", "EagerGradientRelease"),
}
STACKED_BOUNDS = {"guarded": EXACT, "fast": SUMS, "lean": SUMS}


def modules():
    """Name → module and data; the real ones of libraries that are installed, and layouts written after the others."""
    found = dict(MODULES)
    for package in foreign_libraries.find_libraries()[0]:
        found.update(foreign_libraries.LIBRARIES[package])
    return found


class SaveInTheMiddle(L.Callback):
    """Save one checkpoint between two steps of the first epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class RecordGradients(L.Callback):
    """Keep the gradients of each step, and why a technique did nothing."""

    def __init__(self):
        self.steps, self.idle = [], []

    def on_train_batch_end(self, trainer, module, *_):
        techniques = [callback for callback in trainer.callbacks if isinstance(callback, ft.Technique)]
        self.idle = [why for technique in techniques if (why := technique.why_idle(module))]

    def on_before_optimizer_step(self, trainer, module, optimizer):
        trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
        if trained:  # those of OptimizerInBackward are gone by now
            self.steps.append(torch.cat([parameter.grad.double().flatten() for parameter in trained]))

    def distance(self, other):
        """Return the relative difference at the first step that differs; before it, the weights are the same."""
        for expected, found in zip(self.steps, other.steps, strict=True):
            if not torch.equal(expected, found):
                return ((expected - found).norm() / expected.norm()).item()
        return 0.0


def build(name, draws=True):
    """Return a module and its data, the same each time.

    Args:
        name: name of the row's module, or a class.
        draws: whether dropout, stochastic depth and noise are random; micro-batches draw them in another order.
    """
    make, data = modules()[name] if isinstance(name, str) else (name, foreign_modules.token_data)
    torch.manual_seed(7)
    module = make()
    if not draws:
        module.draws = False
        for part in module.modules():
            for attribute in ("p", "dropout", "dropout_p", "dropout_prob", "attention_dropout", "drop_prob"):
                if isinstance(getattr(part, attribute, None), float):
                    setattr(part, attribute, 0.0)
    return module, None if data is None else data()


def train(name, setting, callbacks, folder, resume=None, draws=True):
    """Train the module from its own script, and return it."""
    module, data = build(name, draws)
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


class Row:
    """One module in one setting, and its plain runs with and without random draws."""

    def __init__(self, name, folder):
        self.module, self.setting = rows()[name]
        self.folder, self.is_rounded = folder, self.setting["settings"].get("precision") == "bf16-mixed"
        self.plain = {}

    def weights(self, draws):
        return self._run_plain(draws)[0]

    def gradients(self, draws):
        return self._run_plain(draws)[1]

    def _run_plain(self, draws):
        if draws not in self.plain:
            record = RecordGradients()
            self.plain[draws] = copy.deepcopy(self.train([record], draws=draws).state_dict()), record
        return self.plain[draws]

    def train(self, callbacks, **how):
        return train(self.module, self.setting, callbacks, self.folder, **how)

    def cell(self, makes, bound):
        """Train once more, with techniques, and say how the weights compare with those of the plain run."""
        made = [make() for make in makes]
        draws, record = all(technique.keeps_draws for technique in made), RecordGradients()
        try:
            if isinstance(made[0], ft.ExactResume) and not self.setting["settings"].get("fast_dev_run"):
                path = self.folder / f"{time.monotonic_ns()}.ckpt"
                self.train([*made, SaveInTheMiddle(path)])
                if not path.exists():
                    return "no checkpoint: the run is too short"
                module = self.train([make() for make in makes], resume=path)
            else:
                module = self.train([*made, record], draws=draws)
        except Exception as error:
            said = refusal(error)
            return f"refused: {said}" if said else f"DEFECT: {type(error).__name__}: {str(error)[:400]}"
        if isinstance(bound, str):
            return self._judge_change(module, bound)
        if left := left_behind(module):  # what changes training stays in the model
            return f"DEFECT: left on {left[:3]}"
        gap = distance(self.weights(draws), module.state_dict())
        if self.is_rounded and bound:
            gap, bound = self.gradients(draws).distance(record), ROUNDED
        if gap > bound:
            return f"DEFECT: differs by {gap:.2g}"
        if gap == 0 and len(record.idle) == len(made):
            return f"did nothing: {record.idle[0][0]}"
        return "equal" if gap == 0 else f"{gap:.1e}"

    def _judge_change(self, module, what):
        """Say whether a change of training left alone what it must."""
        found = module.state_dict()
        if what == "finite":
            finite = all(value.isfinite().all() for value in found.values() if value.is_floating_point())
            return "trains another model" if finite else "DEFECT: not finite"
        initial = build(self.module)[0].state_dict()
        kept = {key.replace(".base_layer", ""): value for key, value in found.items()}
        same = all(torch.equal(kept[key].to(value), value) for key, value in initial.items() if _is_weight(key))
        trained = any(found[key].any() for key in found if ".lora_B." in key)
        return "trains its adapter alone" if same and trained else "DEFECT: the base changed, or nothing trained"

    def verify(self, makes):
        """Return "ok", or what ``verify`` says against these techniques on the first batch, in double precision."""
        made = [make() for make in makes]
        draws = all(technique.keeps_draws for technique in made)
        data = build(self.module)[1]
        batch = default_collate([data[index] for index in range(foreign_modules.BATCH)])
        try:
            # Float32 is verified too.
            verified = ft.verify(
                lambda: build(self.module, draws)[0], batch, made, accelerator="cpu", precision="64-true"
            )
        except Exception as error:
            return f"DEFECT: {type(error).__name__}: {error}"
        if verified.ok:
            return "ok"
        if verified.problems or not all(row.ok for row in verified.rows if row.precision == "64-true"):
            return f"DEFECT: {verified.problems} {[row.verdict for row in verified.rows]}"
        return "ok in double precision, further off than rounding of the plain step in float32"


def _is_weight(key):
    """Not statistics of BatchNorm and counts of metrics, which go on."""
    return key.endswith(("weight", "bias"))


def rows():
    """Name of each row → its module and setting."""
    found = {name: (name, nano()) for name in modules()}
    found.update({f"nanoGPT, {name}": (setting["module"], setting) for name, setting in SETTINGS.items()})
    return found


def product(wanted, techniques, folder, tell=lambda *_: None, verifies=False):
    """Return name of the row → name of the technique or stack → what came of it."""
    found = {}
    for name in wanted:
        row = Row(name, folder)
        cells = found[name] = {}
        for technique in techniques:
            make, bound = TECHNIQUES[technique]
            cells[technique] = row.cell([make], bound)
        for stack, members in STACKS.items():
            acting = [one for one in members if not cells.get(one, "refused").startswith(("refused", "did nothing"))]
            makes = [TECHNIQUES[one][0] for one in acting]
            if makes:
                cells[stack] = row.cell(makes, STACKED_BOUNDS[stack])
            if makes and verifies and build(row.module)[1] is not None:
                cells[f"{stack}, verified"] = row.verify(makes)
        tell(name, cells)
    return found


def summarize(found):
    counts = collections.Counter()
    for value in (value for row in found.values() for value in row.values()):
        kinds = ("equal", "refused", "DEFECT", "trains", "no checkpoint", "did nothing", "ok")
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
    parser.add_argument("--verify", action="store_true", help="verify the stacks on a batch, too")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    quiet()
    wanted = [row for row in rows() if re.search(options.rows or "", row)]
    techniques = [name for name in TECHNIQUES if re.search(options.techniques or "", name)]
    with tempfile.TemporaryDirectory() as folder:
        tell = lambda row, cells: print(row, json.dumps(cells), flush=True)  # noqa: E731
        found = product(wanted, techniques, Path(folder), tell, options.verify)
    installed, missing = foreign_libraries.find_libraries()
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
