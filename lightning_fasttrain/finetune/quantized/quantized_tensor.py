"""Tensors that a module multiplies with itself, such as stacks of experts, in 4 bits, and PEFT's LoRA on them."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.modules.recomputation import without_graph
from lightning_fasttrain.core.modules.select import is_a, stands_for
from lightning_fasttrain.core.modules.wrapped_forward import Replacement, WrappedForward, wrappers_on
from lightning_fasttrain.finetune.quantized.quantized_layer import dequantized_weight, quantize_layer_
from lightning_fasttrain.finetune.quantized.quantized_state import keep_quantized_
from lightning_fasttrain.finetune.selection.qualified_names import names_in

StateDict = MutableMapping[str, Any]
_PARAMETER_WRAPPER = "peft.tuners.lora.layer.ParamWrapper"


def quantize_tensor_(owner: nn.Module, name: str, tensor: Tensor, kind: str, double_quant: bool) -> nn.Module:
    """Quantise and freeze parameter ``name`` of ``owner``, whose ``forward`` gets it dequantised.

    The packed weight is in a bitsandbytes layer under the same name, which is never called: so it is counted, moved,
    copied and predicted like all quantised layers. Its key in ``state_dict`` does not change; the keys of its
    quantisation state begin with it.

    Args:
        owner: the module.
        name: name of its parameter.
        tensor: the values, [..., columns].
        kind: ``"nf4"`` or ``"fp4"``.
        double_quant: as for :func:`~lightning_fasttrain.finetune.quantize_base_`.

    Returns:
        The layer that holds it.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    holder: Any = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    holder.stands_for = tuple(tensor.shape)
    # The last argument, the compute dtype, is never used: this layer is not called.
    quantize_layer_(holder, rows, kind, double_quant, tensor.dtype)
    keep_quantized_(holder)
    hold_(owner, name, holder)
    return holder


def hold_(owner: nn.Module, name: str, holder: nn.Module) -> None:
    """Register the layer that holds ``owner``'s tensor ``name`` in place of a parameter or another such layer."""
    # The hooks are registered once, with the first wrapper.
    if not any(wrappers_on(owner, DequantizedTensors)):
        DequantizedTensors(owner).install()
        owner.register_state_dict_post_hook(_remove_layer_names)
        owner.register_load_state_dict_pre_hook(_add_layer_names)
    # The parameter goes first, since torch refuses a module under the name of an existing attribute.
    owner._parameters.pop(name, None)
    owner.add_module(name, holder)


def let_go_(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the 4-bit tensor ``name`` of ``owner`` by a plain frozen parameter."""
    del owner._modules[name]
    owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    _put_in_order_(owner)


def stand_in(holder: object) -> Tensor:
    """Return a tensor with shape, dtype and device of the one that a layer holds, expanded from a single element."""
    one = torch.zeros((), dtype=holder.quant_state.dtype, device=holder.weight.device)
    return one.expand(holder.stands_for)


@contextmanager
def shown_as_parameters(model: nn.Module) -> Iterator[None]:
    """Show 4-bit tensors as parameters of their modules, in the original order, while the context is active."""
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
    """Restore the original order of the parameters, which determines the names of PEFT's adapters in files."""
    first = next(wrappers_on(owner, DequantizedTensors)).order
    for name in [*first, *owner._parameters]:
        if name in owner._parameters:
            owner._parameters[name] = owner._parameters.pop(name)


def held_tensors(owner: nn.Module) -> dict[str, nn.Module]:
    """Map each tensor that ``owner`` holds in 4 bits to the layer that holds it."""
    return {name: child for name, child in owner.named_children() if stands_for(child)}


def holder_under(wrapper: object) -> Any:
    """Return the 4-bit layer with the tensor that a PEFT layer adapts; None if that is a plain parameter."""
    return held_tensors(wrapper.get_base_layer()).get(vars(wrapper).get("parameter_name", ""))


class DequantizedTensors(WrappedForward):
    """Wrapper of a forward that dequantises the module's 4-bit tensors; the backward dequantises them again.

    Activation checkpointing and offloading, if active, handle the dequantised tensors like all other activations. An
    adapter on such a tensor sets ``added`` on the layer that holds it, for the duration of the forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.order = list(module._parameters)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        owner, holders = self.module, held_tensors(self.module)
        dtype = _dtype_of_inputs((*args, *kwargs.values()))
        ways = {name: _WayBack(holder, vars(holder).get("added")) for name, holder in holders.items()}
        floats = {name: way(dtype) for name, way in ways.items()}
        # Instance attributes take precedence over child modules and parameters.
        vars(owner).update(floats)
        try:
            if torch.compiler.is_compiling() or _has_saved_tensors_hooks():
                return self.inner(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(_Packer(floats, ways), _unpack):
                return self.inner(*args, **kwargs)
        finally:
            for name in floats:
                del vars(owner)[name]


def dequantize_tensor(holder: object, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise the tensor that a layer holds for another module, to its original dtype or to ``dtype``."""
    return dequantized_weight(holder).view(holder.stands_for).to(dtype)


def _dtype_of_inputs(inputs: Iterable[object]) -> torch.dtype | None:
    """Return the dtype of the first floating-point input, which may be the Trainer's; None under autocast."""
    for one in inputs:
        if isinstance(one, Tensor) and one.is_floating_point():
            return None if torch.is_autocast_enabled(one.device.type) else one.dtype
    return None


class _WayBack:
    """Dequantise a held tensor and add its adapter; called in the forward and again in the backward."""

    def __init__(self, holder: nn.Module, added: Callable[[Tensor], Tensor] | None) -> None:
        self.holder, self.added = holder, added

    def __call__(self, dtype: torch.dtype | None) -> Tensor:
        weight = dequantize_tensor(self.holder, dtype)
        if self.added is None:
            return weight
        return self.added(weight)


class _Packer:
    """Saved-tensor hook that replaces a dequantised tensor by the function which creates it, and the view of it."""

    def __init__(self, floats: dict[str, Tensor], ways: dict[str, _WayBack]) -> None:
        # By storage, as autograd saves views. The storages are not reused, since ``floats`` outlive the forward.
        self.ways = {_storage(floats[name]): way for name, way in ways.items()}

    def __call__(self, saved: Tensor) -> Any:
        way = self.ways.get(_storage(saved))
        if way is None:
            return without_graph(saved)
        return way, saved.dtype, (saved.shape, saved.stride(), saved.storage_offset())  # shape of the view


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    way, dtype, part = packed
    with torch.no_grad():
        return way(dtype).as_strided(*part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.compiler.disable()
def _has_saved_tensors_hooks() -> bool:
    # True: also during tracing.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _remove_layer_names(owner: nn.Module, state_dict: StateDict, prefix: str, _: object) -> None:
    for name in held_tensors(owner):
        _rename(state_dict, f"{prefix}{name}.weight", f"{prefix}{name}")


def _add_layer_names(owner: nn.Module, state_dict: StateDict, prefix: str, *_: object) -> None:
    for name, holder in held_tensors(owner).items():
        key = f"{prefix}{name}"
        # A checkpoint of the plain model has the complete tensor under this key.
        plain = state_dict.get(key)
        if plain is not None and plain.shape == holder.stands_for:
            state_dict[key] = plain.reshape(-1, plain.shape[-1])  # it is quantised when loaded
        _rename(state_dict, key, f"{key}.weight")


def _rename(state_dict: StateDict, old: str, new: str) -> None:
    """Rename ``old`` and the keys below it; other keys with the same prefix do not change."""
    for key in list(state_dict):
        if key == old or key.startswith(f"{old}."):
            state_dict[f"{new}{key.removeprefix(old)}"] = state_dict.pop(key)


def use_held_tensors_(model: nn.Module) -> None:
    """Let PEFT's wrappers in ``model`` adapt tensors that are held in 4 bits.

    PEFT adds the product of the two low-rank matrices to the parameter for the duration of the forward. Here it is
    added to the dequantised tensor that the module's forward gets, and recomputed in the backward.
    """
    for module in model.modules():
        if is_a(module, _PARAMETER_WRAPPER) and holder_under(module) is not None:
            wrapper: Any = module
            wrapper.get_param, wrapper._activate_lora = GivesStandIn(wrapper), AddsToHeld(wrapper)


class GivesStandIn(Replacement):
    """Replacement of ``get_param`` of PEFT's wrapper, which reads shape, dtype and device of the result."""

    def __call__(self) -> Tensor:
        holder = holder_under(self.module)
        if holder is None:
            return type(self.module).get_param(self.module)
        return stand_in(holder)


class AddsToHeld(Replacement):
    """Replacement of ``_activate_lora`` of PEFT's wrapper, a context in which the adapter is applied."""

    def __call__(self, active: list[str]) -> AbstractContextManager[None]:
        holder, names = holder_under(self.module), names_in(active, self.module.lora_A)
        if holder is None or not names:
            return type(self.module)._activate_lora(self.module, active)
        return self._while_it_lasts(holder, names)

    @contextmanager
    def _while_it_lasts(self, holder: nn.Module, names: list[str]) -> Iterator[None]:
        # By ``vars``, as the holder is a module.
        vars(holder)["added"] = partial(self.add_to, names=names)
        try:
            yield
        finally:
            del vars(holder)["added"]

    def add_to(self, weight: Tensor, names: list[str]) -> Tensor:
        """Return ``weight`` [n, rows, columns] plus the named adapters, with the operations that PEFT uses."""
        wrapper = self.module
        # As in PEFT: several adapters are summed first; a single one over several experts is one ``baddbmm``.
        if len(names) > 1 or wrapper.num_experts == 1:
            return weight + sum(map(wrapper.get_delta_weight, names)).to(weight.dtype)
        lhs, rhs, scaling = wrapper.get_delta_factors(names[0])
        # Autocast would run ``baddbmm`` in half precision and round the complete stack.
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, lhs.to(weight.dtype), rhs.to(weight.dtype), alpha=scaling)
