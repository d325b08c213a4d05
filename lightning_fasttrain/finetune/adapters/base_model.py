"""The pretrained model without its adapters, which are disabled for a while, or unloaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.select import (
    TUNER,
    WRAPPER,
    is_a,
    is_part_of,
    is_tuner,
    list_places,
    replace_modules_,
    walk_around,
)
from lightning_fasttrain.finetune.adapters.adapter_checks import refuse_merged
from lightning_fasttrain.finetune.adapters.add_adapter import adapted_modules, adapter_parameters, forget_adapters_
from lightning_fasttrain.finetune.adapters.merge import merge_layers_, unmerge_adapters_
from lightning_fasttrain.finetune.adapters.merge_quantized import forget_quantization_, tuner_layers
from lightning_fasttrain.finetune.quantized.load_quantized import Original
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    PEFT_MODEL,
    adapters_on,
    changes_base,
    first_few,
    list_trainable,
    names_not_in,
)
from lightning_fasttrain.finetune.selection.float32_adapters import has_prompt, round_again_, switches, without_adapters
from lightning_fasttrain.finetune.selection.freezing import unfreeze_


@check_arguments
@contextmanager
def base_model(model: nn.Module) -> Iterator[nn.Module]:
    """Disable the model's adapters inside a ``with`` block: a reference for DPO, or a teacher for distillation.

    The result is the pretrained model bit for bit. Two kinds of adapters change the pretrained weights themselves
    without keeping a copy, and are refused: initializations that are subtracted from the weights, such as PiSSA, and
    biases that train in place (``LoraConfig(bias="all")``).

    Args:
        model: any module with adapters.

    Raises:
        ValueError: there are no adapters; an adapter is merged, or has changed the pretrained weights.

    Example:
        >>> import peft, torch
        >>> from lightning_fasttrain.finetune import add_adapter_
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> x, before = torch.ones(1, 4), net(torch.ones(1, 4))
        >>> _ = add_adapter_(net, peft.LoraConfig(r=2, init_lora_weights=False), "0")
        >>> with base_model(net) as base:
        ...     torch.equal(base(x), before)
        True
        >>> torch.equal(net(x), before)
        False
    """
    adapted_modules(model)
    refuse_merged(model, "base_model(model)")
    refuse_changed_base(model, "base_model(model)")
    _warn_of_trained_base(model)
    # PEFT changes ``requires_grad`` when adapters are switched.
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with without_adapters(model):
            yield model
    finally:
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


@check_arguments
def enable_adapters_(model: nn.Module, on: bool = True) -> None:
    """Enable or disable the model's adapters; :func:`base_model` disables them for a ``with`` block.

    Raises:
        ValueError: see :func:`base_model`.
    """
    adapted_modules(model)
    refuse_merged(model, f"enable_adapters_(model, {on})")
    if not on:
        refuse_changed_base(model, "enable_adapters_(model, False)")
    for layer in switches(model):
        layer.enable_adapters(on)


@check_arguments
def unload_adapters_(
    model: nn.Module,
    merge: bool = True,
    *,
    names: str | Iterable[str] | None = None,
    into: str | None = None,
    original: Original | None = None,
    batch: object = None,
) -> nn.Module:
    """Unload all adapters from ``model``, in place, which restores the classes and names of the plain model.

    A ``PeftModel`` inside is replaced by the model that it holds.

    Afterwards all parameters that can train are trainable, even if they were frozen before the adapters were added.
    Adapters that are not merged are lost.

    Args:
        model: any module with adapters.
        merge: True: merge the adapters into the weights, and keep the trained copies of fully trained modules; False:
            restore the model from before the adapters. If adapters are already merged, they stay merged, and the
            following arguments must be omitted.
        names: adapters to merge, as for :func:`~lightning_fasttrain.finetune.merge_adapters_`. Merging temporarily
            needs the memory of the weights twice, so that the model is not changed if it fails.
        into: the way to merge into quantised layers, as there.
        original: the full-precision weights; implies ``into="original"``.
        batch: batch to measure the error with, as there.

    Returns:
        ``model``; for a ``PeftModel``, the model inside.

    Raises:
        ValueError: see :func:`~lightning_fasttrain.finetune.merge_adapters_`; also ``merge=False`` for an adapter
            whose initialization changed the weights.

    Example:
        >>> import peft, torch, lightning_fasttrain as ft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> _ = ft.finetune.add_adapter_(net, peft.LoraConfig(r=2), "0")
        >>> unload_adapters_(net)
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): Linear(in_features=4, out_features=4, bias=True)
        )

    Source:
        PEFT's ``merge_and_unload``, for any module.
    """
    roots = list(adapted_modules(model).values())
    if merge or not any(map(has_prompt, roots)):
        _merge_or_unmerge_(model, merge, names, into, original, batch)
    for root in roots:
        _unload_layers_(root, merge)
        if not has_prompt(root):
            del root.peft_config
            forget_quantization_(root)
    forget_adapters_(model)
    unfreeze_(model)
    return _unwrap_peft_models_(model)


def _merge_or_unmerge_(
    model: nn.Module,
    merge: bool,
    names: str | Iterable[str] | None,
    into: str | None,
    original: Original | None,
    batch: object,
) -> None:
    layers = tuner_layers(model)
    done = any(layer.merged for layer in layers.values())
    are_default = names is None and into is None and original is None
    if not are_default and (done or not merge):
        why = "nothing is merged with merge=False"
        if merge:
            why = "the adapters are merged already"
        why += ", so names=, into= and original= have no effect"
        raise ValueError(explain("unload_adapters_", why, "Omit them"))
    if not merge:
        refuse_changed_base(model, "unload_adapters_(merge=False)")
        if done:
            unmerge_adapters_(model)
    elif not done:
        way = "original" if original is not None and into is None else into
        merge_layers_(model, layers, names, way, original, batch)


def _unload_layers_(root: nn.Module, merge: bool) -> None:
    """Replace PEFT's layers by their base layers, and fully trained modules by the trained copy or the original."""
    places, plain = list_places(root), dict[nn.Module, nn.Module]()
    for _, module in list(walk_around(root, lambda module: is_a(module, TUNER, WRAPPER))):
        if is_a(module, TUNER, WRAPPER):
            plain[module] = _plain_module(module, merge)
    replace_modules_(places, plain)


def _plain_module(module: object, merge: bool) -> nn.Module:
    """Return the module of the model that one of PEFT's layers or wrappers holds."""
    if not is_tuner(module) and "modules_to_save" in module._modules:
        copies, active = module.modules_to_save, module.active_adapters
        if not (merge and active and active[0] in copies):
            return module.original_module
        round_again_(copies[active[0]])
        return copies[active[0]]
    if not hasattr(type(module), "unload_and_optionally_merge_module"):
        return module.get_base_layer()
    # PEFT's attention, and its wrappers of tensors.
    plain = module.unload_and_optionally_merge_module(merge=False, safe_merge=True, adapter_names=None)
    # PEFT registers these again, at the end of the parameters.
    if isinstance(plain, nn.MultiheadAttention):
        _put_first_(plain, "in_proj_weight")
        _put_first_(plain.out_proj, "weight")
    return plain


def _put_first_(module: nn.Module, name: str) -> None:
    for other in names_not_in(module._parameters, [name]):
        module._parameters[other] = module._parameters.pop(other)


def _unwrap_peft_models_(model: nn.Module) -> nn.Module:
    """Replace each ``PeftModel`` by the model inside, since PEFT's wrappers cannot run without an adapter."""
    places, plain = list_places(model), dict[nn.Module, nn.Module]()
    for module in list(model.modules()):
        if is_a(module, PEFT_MODEL):
            plain[module] = module.get_submodule("base_model" if has_prompt(module) else "base_model.model")
    replace_modules_(places, plain)
    return plain.get(model, model)


def refuse_changed_base(model: nn.Module, what: str) -> None:
    """Refuse to disable or unload adapters if the model would then differ from the pretrained model.

    Raises:
        ValueError: an adapter's initialization changed the weights, or it trains biases in place.
    """
    for root in adapted_modules(model).values():
        for name, config in adapters_on(root).items():
            if changes_base(config):
                why = f"its initialization '{config.init_lora_weights}' changed the pretrained weights"
                way_out = "Use LoRA(variant='lora'), or a copy.deepcopy(model) from before the adapter"
            elif getattr(config, "bias", "none") != "none":
                why = f"bias='{config.bias}' trains the pretrained biases in place"
                way_out = "Use bias='none', or a copy.deepcopy(model) from before the adapter"
            else:
                continue
            why += ", and no copy of the original values is kept"
            raise ValueError(explain(f"{what} with adapter '{name}'", why, way_out))


def _warn_of_trained_base(model: nn.Module) -> None:
    roots = adapted_modules(model)
    trained = names_not_in(list_trainable(model), adapter_parameters(model))
    unfrozen = [name for name in trained if is_part_of(name, roots)]
    if unfrozen:
        warn(f"base_model: {first_few(unfrozen)} train too, so this is not the pretrained model. Freeze them.")
