"""Adapters train in float32, whatever precision the model beside them is in."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.modules.heads import is_a

_LOW = (torch.bfloat16, torch.float16)
_DICTS = (nn.ModuleDict, nn.ParameterDict)


class StaysInFloat32:
    """Replaces a module's ``_apply``: what is in float32 goes to other devices, but is not rounded.

    ``model.to(torch.bfloat16)`` and ``Trainer(precision="bf16-true")`` come by here. It holds the module, so that a
    copy has its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def move(tensor: Tensor) -> Tensor:
            moved = function(tensor)
            is_rounded = tensor.dtype is torch.float32 and moved.dtype in _LOW
            return tensor.to(moved.device) if is_rounded else moved

        return type(self.module)._apply(self.module, move, recurse)


def keep_adapter_in_float32_(layers: Iterable[Any], name: str) -> None:
    """Put what the adapter of this ``name`` has brought to PEFT's ``layers`` into float32, and keep it there.

    PEFT gives adapters the dtype of the layer. In bfloat16 a step that is less than 1/256 of a weight is rounded away;
    ``peft.get_peft_model`` therefore does the same, once.
    """
    for layer in layers:
        for container in _containers(layer):
            if name in container:
                keep_in_float32_(container)


def keep_in_float32_(module: nn.Module) -> None:
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.dtype in _LOW:
            # By ``.data``: the parameter stays the same object, for optimizers and ties.
            tensor.data = tensor.data.float()
    module._apply = StaysInFloat32(module)


def stays_in_float32(module: nn.Module) -> bool:
    """Whether ``module`` is not rounded."""
    return isinstance(vars(module).get("_apply"), StaysInFloat32)


def let_round_(model: nn.Module) -> None:
    """Let all of ``model`` be rounded again, for DeepSpeed, which updates copies in float32 of its own."""
    for module in filter(stays_in_float32, model.modules()):
        del module._apply


def _containers(layer: Any) -> list[Any]:
    """Of one of PEFT's layers, what has an entry for each adapter; copies of whole modules are no adapter."""
    if not is_a(layer, "BaseTunerLayer"):
        return []
    children = dict(layer.named_children())
    children.pop("base_layer", None)  # whose own containers are no adapter's
    return [child for child in children.values() if isinstance(child, _DICTS) or is_a(child, "BufferDict")]
