"""Support adapters in modules where torch uses a layer's weight without calling the layer."""

from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_fasttrain.core.modules.select import find_tuners, is_a
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, patched, wrapper_on, wrappers_in

_ATTENTION = "peft.tuners.lora.layer.MultiheadAttention"
# Attributes that torch checks only to choose the fast path.
_SWITCHES: dict[type[nn.Module], tuple[str, int]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


class SlowPath(WrappedForward):
    """Replacement forward of torch's encoder layers and encoder that avoids the fused fast path.

    In eval mode the fast path passes the weights of the inner layers to one fused kernel, which would ignore adapters.
    It is avoided only while an adapter is active: otherwise the model equals the pretrained one bit for bit.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        # In train mode torch does not use the fast path.
        if self.module.training or not _is_adapted_inside(self.module):
            return self.inner(*args, **kwargs)
        name, off = next(switch for kind, switch in _SWITCHES.items() if isinstance(self.module, kind))
        with patched(self.module, name, off):
            return self.inner(*args, **kwargs)


class KeepsBaseWeights(WrappedForward):
    """Replacement forward of PEFT's ``nn.MultiheadAttention`` layer that keeps the base weights bit for bit.

    PEFT adds the adapter to the weights, calls the attention, and subtracts the adapter again, which leaves a rounding
    error in the frozen weights at every step.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        layer: Any = self.module
        base = layer.get_base_layer()
        # No copies are needed: PEFT assigns other tensors, and does not write to these.
        before = base.in_proj_weight.data, layer.out_proj.weight.data
        try:
            return self.inner(*args, **kwargs)
        finally:
            base.in_proj_weight.data, layer.out_proj.weight.data = before


def see_adapters_(model: nn.Module, on_error: ExitStack) -> None:
    """Make torch's own layers in ``model`` apply the adapters inside them, in eval mode too."""
    for module in list(model.modules()):
        kind = _kind_for(module)
        if kind is not None and not wrapper_on(module, kind):
            on_error.callback(kind(module).install())


def forget_adapters_(model: nn.Module) -> None:
    """Remove the slow-path wrappers that :func:`see_adapters_` installed."""
    for wrapper in list(wrappers_in(model, SlowPath)):
        wrapper.undo()


def _kind_for(module: nn.Module) -> type[WrappedForward] | None:
    if isinstance(module, tuple(_SWITCHES)) and find_tuners(module):
        return SlowPath
    if is_a(module, _ATTENTION):
        return KeepsBaseWeights
    return None


def _is_adapted_inside(module: nn.Module) -> bool:
    return any(not layer.disable_adapters and not layer.merged for layer in find_tuners(module).values())
