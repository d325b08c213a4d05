"""Keep adapters in float32, whatever the precision of the base model."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.modules.layer_kinds import is_a, is_tuner
from lightning_fasttrain.core.modules.wrapped_forward import Replacement

_LOW = (torch.bfloat16, torch.float16)
_DICTS = (nn.ModuleDict, nn.ParameterDict)
_BUFFER_DICT = "peft.tuners._buffer_dict.BufferDict"


class StaysInFloat32(Replacement):
    """Replacement of a module's ``_apply`` that moves float32 tensors to other devices but does not round them.

    ``model.to(torch.bfloat16)`` and ``Trainer(precision="bf16-true")`` call ``_apply``.
    """

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def move(tensor: Tensor) -> Tensor:
            moved = function(tensor)
            is_rounded = tensor.dtype is torch.float32 and moved.dtype in _LOW
            return tensor.to(moved.device) if is_rounded else moved

        return type(self.module)._apply(self.module, move, recurse)


def keep_adapter_in_float32_(layers: Iterable[Any], name: str) -> None:
    """Convert the parameters of adapter ``name`` in PEFT's ``layers`` to float32, and keep them there.

    PEFT gives adapters the dtype of the layer. In bfloat16 an update of less than 1/256 of a weight is rounded away;
    ``peft.get_peft_model`` therefore does the same, once.
    """
    for layer in layers:
        for container in _containers(layer):
            if name in container:
                keep_in_float32_(container)


def keep_in_float32_(module: nn.Module) -> None:
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.dtype in _LOW:
            # By ``.data``: the parameter stays the same object for optimizers and tied weights.
            tensor.data = tensor.data.float()
    module._apply = StaysInFloat32(module)


def stays_in_float32(module: nn.Module) -> bool:
    """Check whether ``module`` is kept in float32."""
    return isinstance(vars(module).get("_apply"), StaysInFloat32)


def let_round_(model: nn.Module) -> None:
    """Allow all of ``model`` to be rounded again, for DeepSpeed, which updates its own float32 copies."""
    for module in filter(stays_in_float32, model.modules()):
        del module._apply


def _containers(layer: Any) -> list[Any]:
    """Return the containers of a PEFT layer that have an entry per adapter; copies of complete modules do not count."""
    if not is_tuner(layer):
        return []
    children = dict(layer.named_children())
    children.pop("base_layer", None)  # its containers do not belong to an adapter
    return [child for child in children.values() if isinstance(child, _DICTS) or is_a(child, _BUFFER_DICT)]
