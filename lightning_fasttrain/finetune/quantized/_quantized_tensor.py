"""A tensor that a module holds by itself, such as a stack of experts, in 4 bits: made, used, saved and loaded."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.modules.heads import stands_for
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, wrappers_on
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
    # The compute dtype, which comes last, is never used: this layer is not called.
    quantize_layer_(holder, rows, kind, double_quant, tensor.dtype)
    keep_quantized_(holder)
    hold_(owner, name, holder)
    return holder


def hold_(owner: nn.Module, name: str, holder: nn.Module) -> None:
    """Let a layer hold ``owner``'s tensor ``name`` in place of a parameter, or of another layer."""
    if not any(wrappers_on(owner, DequantizedTensors)):  # the hooks come and stay with it
        DequantizedTensors(owner).install()
        owner.register_state_dict_post_hook(_without_the_layers_names)
        owner.register_load_state_dict_pre_hook(_with_the_layers_names)
    owner._parameters.pop(name, None)  # first: torch refuses a module under the name of an attribute
    owner.add_module(name, holder)


def let_go_(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Give ``owner`` a plain parameter again, frozen, in place of what it holds in 4 bits."""
    del owner._modules[name]
    owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    _put_in_order_(owner)


def stand_in(holder: Any) -> Tensor:
    """Shape, dtype and device of the tensor that a layer holds, in the memory of one number."""
    one = torch.zeros((), dtype=holder.quant_state.dtype, device=holder.weight.device)
    return one.expand(holder.stands_for)


@contextmanager
def shown_as_parameters(model: nn.Module) -> Iterator[None]:
    """While it lasts, what is held in 4 bits looks like parameters of its modules, in the order they once had."""
    held = [(owner, held_tensors(owner)) for owner in list(model.modules())]
    for owner, holders in held:
        for name, holder in holders.items():
            del owner._modules[name]
            owner._parameters[name] = nn.Parameter(stand_in(holder), requires_grad=False)
        if holders:
            _put_in_order_(owner)
    try:
        yield
    finally:
        for owner, holders in held:
            for name, holder in holders.items():
                del owner._parameters[name]
                owner._modules[name] = holder


def _put_in_order_(owner: nn.Module) -> None:
    """As PEFT takes the order of the parameters for that of the adapters on them, which the keys in files follow."""
    first = next(wrappers_on(owner, DequantizedTensors)).order
    for name in [*first, *owner._parameters]:
        if name in owner._parameters:
            owner._parameters[name] = owner._parameters.pop(name)


def held_tensors(owner: nn.Module) -> dict[str, nn.Module]:
    """Name of each tensor that ``owner`` holds in 4 bits → the layer that holds it."""
    return {name: child for name, child in owner.named_children() if stands_for(child)}


def holder_under(wrapper: Any) -> Any:
    """What holds, in 4 bits, the tensor that one of PEFT's layers has an adapter for; None if it is a parameter."""
    return held_tensors(wrapper.get_base_layer()).get(vars(wrapper).get("parameter_name", ""))


class DequantizedTensors(WrappedForward):
    """Gives a module's forward the tensors that are held in 4 bits, as floats; the backward dequantises them again.

    While blocks are recomputed, or activations are moved, that is done by these, as for all other activations. An
    adapter on such a tensor leaves ``added`` with the layer that holds it, for as long as the forward takes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.order = list(module._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, holders = self.module, held_tensors(self.module)
        dtype = _dtype_of_inputs((*args, *kwargs.values()))
        ways = {name: _WayBack(holder, vars(holder).get("added")) for name, holder in holders.items()}
        floats = {name: way(dtype) for name, way in ways.items()}
        vars(owner).update(floats)  # attributes of its own are found before its children
        try:
            if torch.compiler.is_compiling() or _somebody_keeps_activations():
                return self.inner(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(_Packer(floats, ways), _unpack):
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


class _WayBack:
    """How to make a held tensor, with its adapter in it, now and in the backward."""

    def __init__(self, holder: nn.Module, added: Callable[[Tensor], Tensor] | None) -> None:
        self.holder, self.added = holder, added

    def __call__(self, dtype: torch.dtype | None) -> Tensor:
        weight = dequantize_tensor(self.holder, dtype)
        return weight if self.added is None else self.added(weight)


class _Packer:
    """What autograd keeps for the backward: of a dequantised tensor, how it was made and which part of it."""

    def __init__(self, floats: dict[str, Tensor], ways: dict[str, _WayBack]) -> None:
        # By storage, as autograd saves views. No other tensor gets one of these: ``floats`` outlive the forward.
        self.ways = {_storage(floats[name]): way for name, way in ways.items()}

    def __call__(self, saved: Tensor) -> Any:
        way = self.ways.get(_storage(saved))
        if way is None:
            return saved
        return way, saved.dtype, (saved.shape, saved.stride(), saved.storage_offset())  # of the view


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    way, dtype, part = packed
    with torch.no_grad():
        return way(dtype).as_strided(*part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.compiler.disable()
def _somebody_keeps_activations() -> bool:
    # True: also while something is traced.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _without_the_layers_names(owner: nn.Module, state_dict: StateDict, prefix: str, _: Any) -> None:
    for name in held_tensors(owner):
        _rename(state_dict, f"{prefix}{name}.weight", f"{prefix}{name}")


def _with_the_layers_names(owner: nn.Module, state_dict: StateDict, prefix: str, *_: Any) -> None:
    for name, holder in held_tensors(owner).items():
        key = f"{prefix}{name}"
        # A checkpoint of the plain model has the whole tensor under this key.
        plain = state_dict.get(key)
        if plain is not None and plain.shape == holder.stands_for:
            state_dict[key] = plain.reshape(-1, plain.shape[-1])  # to be quantised
        _rename(state_dict, key, f"{key}.weight")


def _rename(state_dict: StateDict, old: str, new: str) -> None:
    """``old`` and what is a part of it, in place of where they are; other names that begin alike are left."""
    for key in list(state_dict):
        if key == old or key.startswith(f"{old}."):
            state_dict[f"{new}{key.removeprefix(old)}"] = state_dict.pop(key)
