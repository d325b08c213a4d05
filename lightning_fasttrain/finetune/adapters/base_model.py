"""The pretrained model without its adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.finetune.adapters.add_adapter import (
    adapted_modules,
    adapter_parameters,
    refuse_merged,
)
from lightning_fasttrain.finetune.selection._adapter_switches import switches
from lightning_fasttrain.finetune.selection.base_fingerprint import adapters_on, changes_base, first_few


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
    trained = [(p, p.requires_grad) for p in model.parameters()]  # PEFT changes it when adapters are switched
    layers: list[Any] = list(switches(model))
    on = [layer for layer in layers if not layer.disable_adapters]  # layers that were disabled before stay disabled
    try:
        for layer in on:
            layer.enable_adapters(False)
        yield model
    finally:
        for layer in on:
            layer.enable_adapters(True)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


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
            raise ValueError(
                explain(f"{what} with adapter '{name}'", f"{why}, and no copy of the original values is kept", way_out)
            )


def _warn_of_trained_base(model: nn.Module) -> None:
    brought = adapter_parameters(model)
    for prefix, root in adapted_modules(model).items():
        inside = f"{prefix}." if prefix else ""
        named = [f"{inside}{name}" for name, parameter in root.named_parameters() if parameter.requires_grad]
        if unfrozen := [name for name in named if name not in brought]:
            warn(f"base_model: {first_few(unfrozen)} train too, so this is not the pretrained model. Freeze them.")
