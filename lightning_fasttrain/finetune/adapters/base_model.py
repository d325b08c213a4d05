"""The pretrained model that adapters were put into, seen without them."""

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
    """The model without its adapters, for the length of a ``with``: a reference for DPO, or a distillation's teacher.

    It is the pretrained model bit for bit. Two kinds of adapters change the pretrained weights themselves, of which
    nothing keeps a copy, and are refused: those that take their start out of them, such as PiSSA, and biases that train
    in place (``LoraConfig(bias="all")``).

    Args:
        model: any module with adapters.

    Raises:
        ValueError: no adapters; one is merged, or has changed the pretrained weights.

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
    trained = [(p, p.requires_grad) for p in model.parameters()]  # PEFT sets it when adapters are switched
    layers: list[Any] = list(switches(model))
    on = [layer for layer in layers if not layer.disable_adapters]  # what was off before stays off after it
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
    """Switch the model's adapters on or off until further notice; :func:`base_model` does so for a ``with``.

    Raises:
        ValueError: as :func:`base_model`.
    """
    adapted_modules(model)
    refuse_merged(model, f"enable_adapters_(model, {on})")
    if not on:
        refuse_changed_base(model, "enable_adapters_(model, False)")
    for layer in switches(model):
        layer.enable_adapters(on)


def refuse_changed_base(model: nn.Module, what: str) -> None:
    """Refuse to leave adapters out where what remains is not the pretrained model.

    Raises:
        ValueError: an adapter took its start out of the weights, or trains biases in place.
    """
    for root in adapted_modules(model).values():
        for name, config in adapters_on(root).items():
            if changes_base(config):
                why = f"it began as '{config.init_lora_weights}', which takes its start out of the weights"
                way_out = "Use LoRA(variant='lora'), or a copy.deepcopy(model) from before the adapter"
            elif getattr(config, "bias", "none") != "none":
                why = f"bias='{config.bias}' trains the pretrained biases in place"
                way_out = "Use bias='none', or a copy.deepcopy(model) from before the adapter"
            else:
                continue
            raise ValueError(explain(f"{what} with adapter '{name}'", f"{why}, and no copy of them is kept", way_out))


def _warn_of_trained_base(model: nn.Module) -> None:
    brought = adapter_parameters(model)
    for prefix, root in adapted_modules(model).items():
        inside = f"{prefix}." if prefix else ""
        named = [f"{inside}{name}" for name, parameter in root.named_parameters() if parameter.requires_grad]
        if thawed := [name for name in named if name not in brought]:
            warn(f"base_model: {first_few(thawed)} train too, so this is not the pretrained model. Freeze them.")
