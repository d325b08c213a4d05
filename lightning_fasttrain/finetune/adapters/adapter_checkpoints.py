"""Checkpoints of a fine-tuning run that hold only the trained state, and a fingerprint of the frozen base."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.files.safe_load import CorruptCheckpoint
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import is_part_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch_all
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters
from lightning_fasttrain.finetune.selection.base_fingerprint import base_fingerprint, is_fingerprint, refuse_other_base
from lightning_fasttrain.finetune.selection.qualified_names import names_not_in

FINGERPRINT = "lightning_fasttrain.base"


@check_arguments
def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of ``model.state_dict()`` that training changes: kilobytes rather than gigabytes.

    It excludes frozen parameters and the buffers of layers whose parameters are frozen (BatchNorm's statistics, the
    tables of quantised weights); it includes all adapters, also inactive ones.

    Example:
        >>> import peft, lightning_fasttrain as ft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> _ = ft.finetune.add_adapter_(net, peft.LoraConfig(r=2), "0")
        >>> list(ft.finetune.trained_state(net))
        ['0.lora_A.default.weight', '0.lora_B.default.weight']
    """
    return _trained_part(model.state_dict(), model)


@check_arguments
def trained_names(model: nn.Module) -> list[str]:
    """Return the keys of :func:`trained_state`, in the order of ``model.state_dict()``.

    Fabric saves only these with ``fabric.save(path, {"model": model}, filter={"model": lambda key, _: key in names})``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> _ = net[0].requires_grad_(False)
        >>> trained_names(net)
        ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    adapters = adapter_parameters(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trains = {name for name, parameter in parameters.items() if parameter.requires_grad}
    # Quantised weights have nested keys, such as "weight.absmax", also beside a bias that trains.
    frozen = parameters.keys() - trains
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix=prefix, recurse=False, remove_duplicate=False))
        if own and not own.keys() & trains:
            frozen.add(prefix)
    names = []
    for name in model.state_dict():
        changes = name in trains or (name not in parameters and not is_part_of(name, frozen))
        if name in adapters or changes:
            names.append(name)
    return names


def checkpoint_what_trains_(strategy: Strategy, module: L.LightningModule) -> Undo:
    """Save only :func:`trained_state` in a run's checkpoints, and compare the base's fingerprint when loading them.

    A checkpoint of the complete model, such as one without a fingerprint, is loaded completely. A strategy that loads
    the model by itself, as FSDP2Strategy and ZeROStrategy do, calls its own ``names_to_load`` for the expected names.
    """
    save, load = strategy.save_checkpoint, strategy.load_model_state_dict

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # Lightning calls this on all ranks, and the fingerprint of sharded weights needs all of them.
        save({**checkpoint, FINGERPRINT: base_fingerprint(module)}, *args, **kwargs)

    def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        part = _names_in_part(checkpoint, set(checkpoint["state_dict"]), module, strict)
        load(checkpoint, strict=strict and part is None)

    def names_to_load(checkpoint: Mapping[str, object], saved: set[str], strict: bool) -> set[str]:
        part = _names_in_part(checkpoint, saved, module, strict)
        return set(module.state_dict()) if part is None else part

    changed: dict[str, Any] = {
        "lightning_module_state_dict": lambda: trained_state(module),
        "save_checkpoint": save_checkpoint,
    }
    # Such a strategy has already loaded the model when Lightning calls ``load_model_state_dict``.
    if hasattr(strategy, "names_to_load"):
        changed["names_to_load"] = names_to_load
    else:
        changed["load_model_state_dict"] = load_model_state_dict
    return patch_all(strategy, changed)


def keep_what_trains_(checkpoint: dict[str, Any], module: L.LightningModule) -> None:
    """Remove the frozen base from a checkpoint, and add its fingerprint; nothing if it holds no more."""
    state = checkpoint["state_dict"]
    trained = _trained_part(state, module)
    if len(trained) < len(state):
        checkpoint["state_dict"] = trained
        checkpoint[FINGERPRINT] = base_fingerprint(module)


def _trained_part(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: state[name] for name in trained_names(model) if name in state}


def _names_in_part(
    checkpoint: Mapping[str, Any], saved: set[str], module: L.LightningModule, strict: bool
) -> set[str] | None:
    """Return the names to load from a checkpoint of the trained state; None for a checkpoint of the complete model."""
    if FINGERPRINT not in checkpoint:
        _refuse_plain(saved, module)
        return None
    if not is_fingerprint(checkpoint[FINGERPRINT]):
        raise CorruptCheckpoint(explain("the checkpoint", "its fingerprint is damaged", "Use an older checkpoint"))
    refuse_other_base(checkpoint[FINGERPRINT], module, "the checkpoint")
    known = set(module.state_dict())
    missing = names_not_in(trained_names(module), saved)
    # Modules that are unfrozen later need not train yet.
    more = sorted(saved - known)
    if strict and (missing or more):
        why = f"this run has no {more[:3]}"
        if missing:
            why = f"it lacks {missing[:3]}"
        way_out = "Resume with the same adapter (targets, rank, train=)"
        raise ValueError(explain("the checkpoint has other trained parameters than this run", why, way_out))
    return saved & known


def _refuse_plain(saved: set[str], module: L.LightningModule) -> None:
    adapters = adapter_parameters(module)
    if adapters and not adapters & saved:
        why = "it was saved before the adapter was added, so this run can start from it but not resume it"
        way_out = "Load it into the model before the run, with load_state_dict, and omit ckpt_path"
        raise ValueError(explain("the checkpoint holds no adapter", why, way_out))
