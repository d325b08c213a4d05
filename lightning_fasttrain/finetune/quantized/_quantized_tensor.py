"""A tensor that a module holds by itself, such as a stack of experts, in 4 bits: made, used, saved and loaded."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain._heads import stands_for
from lightning_fasttrain._surgery import WrappedForward, wrappers_on
from lightning_fasttrain.finetune.quantized._quantized_layer import dequantized_weight, quantize_layer_
from lightning_fasttrain.finetune.quantized.quantized_state import keep_quantized_

StateDict = MutableMapping[str, Any]


def quantize_tensor_(owner: nn.Module, name: str, tensor: Tensor, kind: str, double_quant: bool) -> nn.Module:
    """Hold ``owner``'s parameter ``name`` in 4 bits from now on, frozen; its ``forward`` gets it dequantised.

    What is packed is in a layer of bitsandbytes' under the same name, which is never called: so it is counted, moved,
    copied and predicted as all quantised layers are. Keys of ``state_dict`` stay; those of its parts begin with them.

    Args:
        owner: the module.
        name: of its parameter.
        tensor: the values, [..., columns].
        kind: ``"nf4"`` or ``"fp4"``.
        double_quant: as for :func:`~lightning_fasttrain.finetune.quantize_base_`.

    Returns:
        The layer that holds it.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    holder: Any = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    holder.stands_for = tuple(tensor.shape)
    quantize_layer_(holder, rows, kind, double_quant, tensor.dtype)
    keep_quantized_(holder)
    del owner._parameters[name]
    owner.add_module(name, holder)
    if not any(wrappers_on(owner, DequantizedTensors)):
        DequantizedTensors(owner).install()
        owner.register_state_dict_post_hook(_without_the_layers_names)
        owner.register_load_state_dict_pre_hook(_with_the_layers_names)
    return holder


def held_tensors(owner: nn.Module) -> dict[str, nn.Module]:
    """Name of each tensor that ``owner`` holds in 4 bits → the layer that holds it."""
    return {name: child for name, child in owner.named_children() if stands_for(child)}


class DequantizedTensors(WrappedForward):
    """Gives a module's forward the tensors that are held in 4 bits, as floats; the backward dequantises them again.

    While blocks are recomputed, or activations are moved, that is done by these, as for all other activations.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, holders = self.module, held_tensors(self.module)
        dtype = _dtype_of_inputs((*args, *kwargs.values()))
        floats = {name: dequantize_tensor(holder, dtype) for name, holder in holders.items()}
        vars(owner).update(floats)  # attributes of its own are found before its children
        try:
            if torch.compiler.is_compiling() or _somebody_keeps_activations():
                return self.inner(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(_Packer(floats, holders), _unpack):
                return self.inner(*args, **kwargs)
        finally:
            for name in floats:
                del vars(owner)[name]


def dequantize_tensor(holder: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that a layer holds for another module, in the dtype that was quantised, or in another."""
    return dequantized_weight(holder).view(holder.stands_for).to(dtype)


def _dtype_of_inputs(inputs: Iterable[Any]) -> torch.dtype | None:
    """That of the first float, as the Trainer may have made it another since; autocast has a say of its own."""
    floats = [one for one in inputs if isinstance(one, Tensor) and one.is_floating_point()]
    return floats[0].dtype if floats and not torch.is_autocast_enabled(floats[0].device.type) else None


class _Packer:
    """What autograd keeps for the backward: of a dequantised tensor, where it comes from and which part of it."""

    def __init__(self, floats: dict[str, Tensor], holders: dict[str, nn.Module]) -> None:
        self.holders = {_storage(floats[name]): holder for name, holder in holders.items()}

    def __call__(self, saved: Tensor) -> Any:
        holder = self.holders.get(_storage(saved))
        if holder is None:
            return saved
        return holder, saved.dtype, (saved.shape, saved.stride(), saved.storage_offset())


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    holder, dtype, part = packed
    return dequantize_tensor(holder, dtype).as_strided(*part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.compiler.disable()
def _somebody_keeps_activations() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _without_the_layers_names(owner: nn.Module, state_dict: StateDict, prefix: str, _: Any) -> None:
    for name in held_tensors(owner):
        _rename(state_dict, f"{prefix}{name}.weight", f"{prefix}{name}")


def _with_the_layers_names(owner: nn.Module, state_dict: StateDict, prefix: str, *_: Any) -> None:
    for name, holder in held_tensors(owner).items():
        key = f"{prefix}{name}"
        plain = state_dict.get(key)
        if plain is not None and plain.shape == holder.stands_for:
            state_dict[key] = plain.reshape(-1, plain.shape[-1])  # to be quantised
        _rename(state_dict, key, f"{key}.weight")


def _rename(state_dict: StateDict, old: str, new: str) -> None:
    """``old`` and what is a part of it, in place of where they are; other names that begin alike are left."""
    for key in list(state_dict):
        if key == old or key.startswith(f"{old}."):
            state_dict[f"{new}{key.removeprefix(old)}"] = state_dict.pop(key)
