"""Train every class of the installed transformers that can be built small, with techniques and without them.

Run as ``python examples/transformers_classes.py examples/results/transformers_classes_cpu.json``. Each class runs in a
process of its own, with a small configuration that is derived from its default one: few layers, heads and words, and no
dropout. The weights after two steps of SGD are compared with those of a plain run. LoRA is compared with an
independent one, of ``torch.nn.utils.parametrize``; that on a 4-bit base with the same on the dequantized weights.
``--task`` and ``--only`` select classes, and an existing file is completed.
"""

import argparse
import inspect
import json
import multiprocessing
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
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
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.pytorch_utils import Conv1D

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import hardware
from lightning_fasttrain.core.files import write_atomic

WORDS, LENGTH, ROWS, RANK = 99, 12, 6, 2
PER_CLASS_S = 240
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
OF_TEXT = ("causal", "masked", "sequence to sequence", "vision-language", "speech")
# Names of numbers in configurations → small values; the first that matches counts.
SMALL = {
    r"feat_extract|conv_(dim|stride|kernel)": 2**20,  # of one length, and small
    r"per_tok|top_?k|num_selected|moe_k": 2,
    r"vocab|num_embeddings$|num_tokens$": WORDS,
    r"^num_labels$": 3,
    r"(key_value|kv)_heads|num_key_value|multi_query_group": 2,
    r"head_dim|d_kv|kv_channels|attention_head_size|dim_head|head_size|qk_\w*dim|v_dim|rotary_dim": 8,
    r"heads?$|heads?_\w*$|n_heads?|num_attention_head": 4,
    r"(layers?|blocks?|depth|_layer)$|num_hidden_layers|n_layers?|layers?_\w*num": 2,
    r"intermediate|ffn|d_ff|mlp_dim|n_inner|inner_dim|feed_forward|mlp_hidden|d_inner": 64,
    r"lora_rank|low_rank|lora_dim": 8,
    r"experts?$|num_(local|routed|shared)?_?experts|expert_num": 4,
    r"n_group|topk_group|num_groups|n_groups|num_group": 1,
    r"hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|^dim$|width|channels?$|_dim$|hidden": 32,
    r"position|n_ctx|max_seq|max_length|seq_len|source|target|context_length|window": 64,
    r"image_size|input_size|img_size": 32,
    r"patch_size|patch_stride": 8,
    r"num_mel_bins|feature_size|num_mel": 16,
}
# What is tried one after the other: settings whose names match a pattern have another value, or their default.
CHANGES: tuple[tuple[str, int | None], ...] = (
    ("$^", None),
    ("(key_value|kv)_heads", 4),
    ("type", None),
    ("head_dim|head_size|d_kv", None),
    ("head_?dim|d_head", 16),
    ("heads", None),
    ("hidden_size_per_layer", 0),
)
SETTINGS: dict[str, Callable[[], list[Any]]] = {
    "fused head": lambda: [ft.FusedLossHead()],
    "micro-batches": lambda: [ft.MicroBatching(3)],
    "recomputed": lambda: [ft.ActivationCheckpointing()],
    "LoRA": lambda: [ft.LoRA(rank=RANK)],
    "LoRA on 4 bits": lambda: [ft.QLoRA(rank=RANK)],
}


def list_classes(task: str) -> Iterator[tuple[str, str]]:
    """Return the classes with the first type of model of each."""
    seen: set[str] = set()
    for kind, names in getattr(modeling_auto, TASKS[task]).items():
        name = names[0] if isinstance(names, tuple | list) else names
        if name not in seen:
            seen.add(name)
            yield kind, name


def small_settings(config: Any) -> dict[str, Any]:
    """Return arguments that make a configuration small."""
    chosen: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            chosen[name] = small_settings(value)
        elif name.startswith("_") or isinstance(value, bool):
            continue
        elif name.endswith("token_id") and isinstance(value, int):
            chosen[name] = value if value < WORDS else 3 + value % 7
        elif isinstance(value, float) and re.search("drop|jitter|noise|mask_\\w*prob", name):
            chosen[name] = 0.0
        elif name in ("layer_types", "layers_block_type") and isinstance(value, list):
            chosen[name] = list(dict.fromkeys(value))[:2] if len(set(value)) > 1 else value[:2]
        elif isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            chosen[name] = [_small(name.rstrip("s"), item) for item in value]
        elif isinstance(value, int):
            chosen[name] = _small(name, value)
    return chosen


def _small(name: str, value: int) -> int:
    if value < 2:
        return value
    return next((min(value, small) for pattern, small in SMALL.items() if re.search(pattern, name)), value)


def _change(settings: dict[str, Any], pattern: str, value: int | None) -> dict[str, Any]:
    """Return settings in which those of some names have another value, or are left out."""
    changed: dict[str, Any] = {}
    for name, given in settings.items():
        if isinstance(given, dict):
            changed[name] = _change(given, pattern, value)
        elif not re.search(pattern, name):
            changed[name] = given
        elif value is not None:
            changed[name] = value
    return changed


def build(task: str, kind: str, name: str) -> nn.Module:
    """Build a small model of a class, or raise the error of the last way that was tried."""
    make_model: Any = getattr(transformers, name)
    make_config: Any = make_model.config_class or configuration_auto.CONFIG_MAPPING[kind]
    settings = small_settings(make_config())
    error: Exception | None = None
    for change in CHANGES:
        try:
            config = make_config(**_change(settings, *change))
            config.use_cache = False
            if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = 0
            torch.manual_seed(0)
            model = make_model(config).train()
            loss = loss_of(model, make_batch(task, model))
            if not loss.isfinite():
                raise ValueError(f"its loss is {loss.item()}")
            loss.backward()
            model.zero_grad()
            return model
        except Exception as failure:
            error = failure
    assert error is not None
    raise error


def make_batch(task: str, model: Any) -> dict[str, Tensor]:
    """Return a batch of texts that are padded on the right, of images, or of sounds."""
    generator, config = torch.Generator().manual_seed(0), model.config
    names = inspect.signature(model.forward).parameters
    batch: dict[str, Tensor] = {}
    if task == "images":
        sizes = [getattr(part, "image_size", None) for part in (config, getattr(config, "backbone_config", None))]
        side = next((size for size in sizes if isinstance(size, int)), 32)
        batch["pixel_values"] = torch.randn(ROWS, getattr(config, "num_channels", 3), side, side, generator=generator)
        return {**batch, "labels": torch.arange(ROWS) % config.num_labels}
    if task in ("sound", "speech"):
        if "input_features" in names:
            bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 16)
            shape = (ROWS, bins, 2 * getattr(config, "max_source_positions", 32))
            batch["input_features"] = torch.randn(shape, generator=generator)
        else:
            batch["input_values"] = torch.randn(ROWS, 1600, generator=generator)
    if task == "sound":
        return {**batch, "labels": torch.arange(ROWS) % config.num_labels}
    tokens = torch.randint(20, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([12, 7, 9, 12, 5, 8])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    if task == "speech":
        return {**batch, "labels": labels}
    pad = getattr(config.get_text_config(), "pad_token_id", None) or 0
    return {"input_ids": tokens.masked_fill(mask == 0, pad), "attention_mask": mask, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


class Module(L.LightningModule):
    """Trains a model by its own loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05)


def fit(net: nn.Module, batch: dict[str, Tensor], callbacks: list[Any]) -> dict[str, Tensor]:
    """Train for two steps, and return what was trained."""
    rows = [{name: values[row] for name, values in batch.items()} for row in range(ROWS)] * 2
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
    trainer.fit(module, DataLoader(rows, batch_size=ROWS))
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
    callbacks = SETTINGS[setting]()
    net = build(task, kind, name)
    batch = make_batch(task, net)
    if "LoRA" in setting:
        reference = KeepAdapted(build(task, kind, name))
        found = fit(net, batch, [*callbacks, reference])
        trained = fit(reference.net, batch, [])
        expected = {ours: trained[theirs] for ours, theirs in reference.names.items()}
        before = {ours: torch.zeros(()) for ours in expected if "lora_B" in ours}
    else:
        expected, found = plain, fit(net, batch, callbacks)
        start = {f"net.{key}": value.detach() for key, value in build(task, kind, name).named_parameters()}
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
    try:
        net = build(task, kind, name)
    except Exception as error:
        send.send(("not built", f"{type(error).__name__}: {error}".splitlines()[0][:200]))
        return
    plain: dict[str, Tensor] = {}
    try:
        plain = fit(net, make_batch(task, net), [])
        again = fit(build(task, kind, name), make_batch(task, net), [])
        apart = max((again[key] - value).abs().max().item() for key, value in plain.items())
        send.send(("plain", {"difference": apart}))
    except Exception as error:
        send.send(("plain", explain_failure(error)))
        return
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
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(args.output.read_text())["classes"] if args.output.exists() else {}
    for task in args.task or TASKS:
        for kind, name in list_classes(task):
            key = f"{task}: {name}"
            if args.only and not re.search(args.only, name):
                continue
            if key in known and not args.only:
                continue
            known[key] = run_class(task, kind, name)
            print(key, json.dumps(known[key]), flush=True)
            facts = {**hardware(), "transformers": transformers.__version__, "date": time.strftime("%F")}
            write_atomic(args.output, json.dumps({"facts": facts, "classes": known}, indent=1) + "\n")
    print(summarize(known))


if __name__ == "__main__":
    main()
