"""Train every class of the installed transformers that can be built small, with techniques and without them.

Run as ``python -m examples.transformers_classes examples/results/transformers_classes_cpu.json``. Each class runs in a
process of its own, with the model and batch of :mod:`examples.small_transformers`. The weights after two steps of SGD
are compared with those of a plain run. LoRA is compared with an independent one, of ``torch.nn.utils.parametrize``;
that on a 4-bit base with the same on the dequantized weights. ``--task`` and ``--only`` select classes, and an existing
file is completed; ``--again`` repeats what was not built, or had text alone beside images
or sounds.
"""

import argparse
import json
import multiprocessing
import re
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import bitsandbytes
import lightning as L
import peft  # noqa: F401, imported once for all processes
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader
from transformers.pytorch_utils import Conv1D

import lightning_fasttrain as ft
from examples.small_batches import ROWS, Batch
from examples.small_transformers import TASKS, build, list_classes, loss_of
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware

RANK = 2
PER_CLASS_S = 240
OF_TEXT = ("causal", "masked", "sequence to sequence", "vision-language", "speech")
SETTINGS: dict[str, Callable[[Batch], list[Any]]] = {
    "fused head": lambda batch: [ft.FusedLossHead()],
    "micro-batches": lambda batch: [ft.MicroBatching(3, split=None if has_rows(batch) else split_patches)],
    "recomputed": lambda batch: [ft.ActivationCheckpointing()],
    "LoRA": lambda batch: [ft.LoRA(rank=RANK)],
    "LoRA on 4 bits": lambda batch: [ft.QLoRA(rank=RANK)],
}


def has_rows(batch: Batch) -> bool:
    return all(len(values) == ROWS for values in batch.values())


def split_patches(batch: Batch, n: int) -> list[Batch]:
    """Split a batch in which all images have as many patches, which are rows of one tensor."""
    n = min(n, len(batch["labels"]))
    parts = zip(*(values.chunk(n) for values in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


class Module(L.LightningModule):
    """Trains a model by its own loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05)


def fit(net: nn.Module, batch: Batch, callbacks: list[Any]) -> dict[str, Tensor]:
    """Train for two steps, and return what was trained."""
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    module = Module(net)
    found: dict[str, Tensor] = {}

    class Keep(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            for name, parameter in pl_module.named_parameters():
                if parameter.requires_grad:
                    found[name] = parameter.detach().clone()

    trainer.callbacks.insert(0, Keep())  # before techniques are undone
    torch.manual_seed(1)
    trainer.fit(module, DataLoader([batch, batch], batch_size=None))
    return found


class LowRank(nn.Module):
    """W + s·B·A, of a layer or of a stack of experts, in the order of axes in which the weight is stored."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, equation: str) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.scale, self.equation = scale, equation

    def forward(self, weight: Tensor) -> Tensor:
        a, b = self.a, self.b
        if weight.ndim == 3:  # PEFT's rows of A are those of one expert after the other, and columns of B by rank
            experts = len(weight)
            a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).movedim(2, 0)
        return weight + self.scale * torch.einsum(self.equation, b, a).to(weight.dtype)


def take_quantized_(net: nn.Module, adapted: nn.Module) -> None:
    """Give a plain model the values that the quantised weights of an adapted one stand for."""
    plain = dict(net.named_modules())
    for name, module in adapted.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            layer = plain.get(place := name.replace(".base_layer", ""))
            if layer is None:  # it holds one tensor of its module, such as a stack of experts
                owner, _, own = place.rpartition(".")
                current = getattr(plain[owner], own)
            else:
                current = layer.weight
            weight = ft.finetune.dequantized_weight(module)
            if isinstance(layer, Conv1D):
                weight = weight.T
            current.data = weight.reshape(current.shape).to(current.dtype)


def adapters_by_hand(net: nn.Module, adapted: nn.Module) -> dict[str, str]:
    """Give a plain model the adapters of an adapted one as parametrizations; return the names of its parameters."""
    names: dict[str, str] = {}
    net.requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # beside an adapter, statistics are frozen too
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
    take_quantized_(net, adapted)
    layers = dict(net.named_modules())
    for name, module in adapted.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        adapter: Any = module
        own = getattr(adapter, "parameter_name", None) or "weight"
        place = name.replace(".base_layer", "")
        layer: Any = layers[place]
        key = next(iter(adapter.lora_A))
        a, b = adapter.lora_A[key].weight.detach(), adapter.lora_B[key].weight.detach()
        shape = getattr(layer, own).shape
        is_stored_out_in = not isinstance(layer, Conv1D)
        if len(shape) == 3:
            is_stored_out_in = adapter._did_swap_in_out_features
        experts = "e" if len(shape) == 3 else ""
        stored = "oi" if is_stored_out_in else "io"
        low_rank = LowRank(a, b, adapter.scaling[key], f"{experts}or,{experts}ri->{experts}{stored}")
        parametrize.register_parametrization(layer, own, low_rank)
        for part in ("A", "B"):
            theirs = f"net.{place}.parametrizations.{own}.0.{part.lower()}"
            names[f"net.{name}.lora_{part}.{key}.weight"] = theirs
    return names


class KeepAdapted(L.Callback):
    """Builds the reference when the adapters are there, before the first step."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.names = net, {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.names = adapters_by_hand(self.net, pl_module.net)


def compare(task: str, kind: str, name: str, setting: str, plain: dict[str, Tensor]) -> dict[str, Any]:
    """Return the largest difference from the reference relative to the largest step, or why there is none."""
    net, batch, _ = build(task, kind, name)
    callbacks = SETTINGS[setting](batch)
    if "LoRA" in setting:
        reference = KeepAdapted(build(task, kind, name).net)
        found = fit(net, batch, [*callbacks, reference])
        trained = fit(reference.net, batch, [])
        expected = {ours: trained[theirs] for ours, theirs in reference.names.items()}
        before = {ours: torch.zeros(()) for ours in expected if "lora_B" in ours}
    else:
        expected, found = plain, fit(net, batch, callbacks)
        start = {f"net.{key}": value.detach() for key, value in build(task, kind, name).net.named_parameters()}
        before = {key: start[key] for key in expected}
    missing = sorted(set(expected) - set(found))
    if missing:
        return {"wrong": f"{len(missing)} parameters were not trained, such as {missing[0]}"}
    moved = max((expected[key] - value).abs().max().item() for key, value in before.items())
    apart = max((found[key] - value).abs().max().item() for key, value in expected.items())
    return {"difference": apart, "moved": moved}


def explain_failure(error: Exception) -> dict[str, str]:
    """Return the first line of an error, as a refusal if this package raised it on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = "lightning_fasttrain" in frames[-1].filename and isinstance(error, ValueError | TypeError | RuntimeError)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return {"refused" if is_ours else "raised": f"{type(error).__name__}: {text}"[:400]}


def scan_class(task: str, kind: str, name: str, send: Any) -> None:
    """Send the rows of one class, as they become known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plain: dict[str, Tensor] = {}
    try:
        net, batch, inputs = build(task, kind, name)
        plain = fit(net, batch, [])
        if not all(values.isfinite().all() for values in plain.values()):
            raise ValueError("its weights are not finite after two steps")
        again = fit(build(task, kind, name).net, batch, [])
    except Exception as error:
        text = " ".join(str(error).split())  # some begin with an empty line
        send.send(("not built", f"{type(error).__name__}: {text}"[:200]))
        return
    apart = max((again[key] - value).abs().max().item() for key, value in plain.items())
    send.send(("inputs", inputs))
    send.send(("plain", {"difference": apart}))
    for setting in SETTINGS:
        if setting == "fused head" and task not in OF_TEXT:
            continue
        try:
            send.send((setting, compare(task, kind, name, setting, plain)))
        except Exception as error:
            send.send((setting, explain_failure(error)))


def run_class(task: str, kind: str, name: str) -> dict[str, Any]:
    """Scan a class in a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=scan_class, args=(task, kind, name, send))
    process.start()
    send.close()
    rows: dict[str, Any] = {}
    deadline = time.monotonic() + PER_CLASS_S
    with suppress(EOFError):
        while receive.poll(max(0.0, deadline - time.monotonic())):
            setting, row = receive.recv()
            rows[setting] = row
    if process.is_alive() and time.monotonic() >= deadline:
        process.kill()
        rows["ended"] = f"after {PER_CLASS_S} s"
    process.join()
    if process.exitcode and "ended" not in rows:
        rows["ended"] = f"with exit code {process.exitcode}"
    return rows


def may_be_more(task: str, rows: dict[str, Any]) -> bool:
    """Return whether a class was not built, or was given text though it reads images or sounds."""
    has_text_alone = rows.get("inputs", "text") == "text"
    return "plain" not in rows or (task in ("vision-language", "speech") and has_text_alone)


def is_right(row: dict[str, Any]) -> bool:
    apart, moved = row.get("difference", 1.0), row.get("moved", 0.0)
    return apart <= 1e-3 * moved or (apart <= 1e-5 and moved >= 1e-4)


def summarize(classes: dict[str, Any]) -> str:
    """Return a table of how many classes are right, refused and wrong with each technique."""
    built = {name: rows for name, rows in classes.items() if "plain" in rows}
    lines = [f"{len(classes)} classes, {len(built)} built small"]
    for setting in SETTINGS:
        rows = {name: rows[setting] for name, rows in built.items() if setting in rows}
        right = [name for name, row in rows.items() if is_right(row)]
        refused = [name for name, row in rows.items() if "refused" in row]
        rest = [name for name in rows if name not in right and name not in refused]
        lines.append(f"{setting}: {len(right)} right, {len(refused)} refused, {len(rest)} others {' '.join(rest)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--only", help="a pattern of the names of classes")
    parser.add_argument("--again", action="store_true", help="repeat what is not built or has text alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(args.output.read_text())["classes"] if args.output.exists() else {}
    for task in args.task or TASKS:
        for kind, name in list_classes(task):
            key = f"{task}: {name}"
            if args.only and not re.search(args.only, name):
                continue
            if key in known and not args.only and not (args.again and may_be_more(task, known[key])):
                continue
            known[key] = run_class(task, kind, name)
            print(key, json.dumps(known[key]), flush=True)
            facts = {**hardware(), "transformers": transformers.__version__, "date": time.strftime("%F")}
            write_atomic(args.output, json.dumps({"facts": facts, "classes": known}, indent=1) + "\n")
    print(summarize(known))


if __name__ == "__main__":
    main()
