"""Tensors that a module multiplies with itself, such as stacks of experts, in 4 bits, and PEFT's LoRA on them."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.recomputation import without_graph
from lightning_fasttrain.core.modules.select import is_a, stands_for
from lightning_fasttrain.core.modules.wrapped_forward import Replacement, WrappedForward, wrapper_on, wrappers_on
from lightning_fasttrain.finetune.quantized.quantized_layer import (
    FLOATS,
    NESTED_BLOCK,
    dequantize_4bit,
    dequantized_weight,
    in_8_bits,
    is_quantized,
    pack,
    quantize_layer_,
    require_bitsandbytes,
    settle_4bit_,
    settle_8bit_,
    was_transposed,
)
from lightning_fasttrain.finetune.selection.base_fingerprint import names_in

StateDict = MutableMapping[str, Any]
_NO_TENSOR = "is not a tensor, or a part of its quantisation state is not"
_MOST_SETTINGS = 4096  # bytes; the settings are a few names and values


@check_arguments
def keep_quantized_(layer: Any) -> None:
    """Make a quantised layer preserve its state when it is saved, loaded, copied, moved or validated, in place.

    Layers of bitsandbytes save their state but cannot load it: ``load_state_dict`` refuses the additional keys in
    4 bits, and in int8 after the first forward. After this call they load checkpoints of a quantised model, and of the
    plain model, whose weights are then quantised. On CPUs with AVX512-BF16 a 4-bit layer would also repack itself in
    eval mode, with rounded constants, and give no gradient in later training; this is switched off. With AVX-512,
    bitsandbytes computes wrong products if the number of inputs is not a multiple of 64; another implementation is used
    on the CPU. :func:`~lightning_fasttrain.finetune.quantize_base_` calls this function itself. Calling it twice has
    the same effect as once.

    Args:
        layer: a quantised ``Linear4bit`` or ``Linear8bitLt`` of bitsandbytes.

    Raises:
        TypeError: ``layer`` is not quantised.

    Example:
        >>> import bitsandbytes as bnb
        >>> one, two = (bnb.nn.Linear4bit(64, 64).to("cpu") for _ in range(2))
        >>> keep_quantized_(two)
        >>> two.load_state_dict(one.state_dict())
        <All keys matched successfully>

    Source:
        Ours; checked bit for bit against the saved layer.
    """
    if not is_quantized(layer):
        raise TypeError(explain(f"{type(layer).__name__}", "it is not quantised", "Call quantize_base_ on its model"))
    if in_8_bits(layer):
        _hook_(layer, load_8bit, settle_8bit_)
    else:
        _hook_(layer, load_4bit, settle_4bit_)
        _disable_repacking_(layer)
        if layer.in_features % layer.quant_state.blocksize and not wrapper_on(layer, UnalignedForward):
            UnalignedForward(layer).install()


class UnalignedForward(WrappedForward):
    """Wrapper of the forward of a ``Linear4bit`` that replaces it on the CPU, for rows not aligned with blocks.

    Needed by SigLIP in transformers, whose MLP is 4,304 wide: ``test_siglips_mlp_in_4_bits_is_exact_on_the_cpu``.
    """

    module: Any

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self.inner(x)
        inputs = x.to(self.module.compute_dtype or x.dtype)
        bias = None if self.module.bias is None else self.module.bias.to(inputs.dtype)
        return _Product.apply(inputs, self.module.weight, self.module.quant_state, bias).to(x.dtype)


class _Product(torch.autograd.Function):
    """Compute x·Wᵀ + b, saving neither ``x`` nor the dequantised weight for the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, packed: Tensor, state: object, bias: Tensor | None) -> Tensor:
        # Not by ``save_for_backward``: hooks that offload saved tensors would move the frozen weight as well.
        ctx.packed, ctx.state = packed, state
        with torch.autocast("cpu", enabled=False):
            product = F.linear(x, dequantize_4bit(packed, state, x.dtype), bias)
        # ``F.linear`` returns a view of rows, which the model could not write into.
        return torch.ops.aten._unsafe_view(product, product.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ dequantize_4bit(ctx.packed, ctx.state, gradient.dtype), None, None, None


def _hook_(layer: object, load: Callable[..., None], settle: Callable[..., None]) -> None:
    if layer.weight.dtype in FLOATS and layer.weight.dim() == 2 and layer.weight.shape[1] == layer.in_features:
        # bitsandbytes quantises a layer when it is first moved, even to the device where it is.
        layer.to(layer.weight.device)
    settle(layer)
    # A copied layer has its hooks already.
    if not any(hook.hook is load for hook in layer._load_state_dict_pre_hooks.values()):
        layer.register_load_state_dict_pre_hook(load)
        layer.register_forward_pre_hook(settle)


def _disable_repacking_(layer: object) -> None:
    if getattr(layer.quant_state, "packing_format_for_cpu", False):
        # As a side effect, saving unpacks the weight.
        layer._save_to_state_dict({}, "", keep_vars=True)
        layer.quant_state = layer.weight.quant_state
    # bitsandbytes checks this attribute before it repacks the weight.
    layer.support_avx512bf16_for_cpu = False


def load_4bit(layer: Any, state_dict: StateDict, prefix: str, *rest: Any) -> None:
    """Load the quantisation state, or quantise a plain weight: a hook of ``load_state_dict``."""
    *_, errors = rest
    name = f"{prefix}weight"
    weight = state_dict.get(name)
    if weight is None:  # a checkpoint without this weight, such as one of adapters
        return
    settle_4bit_(layer)
    old = layer.weight.quant_state
    # Removed from the dict, or they would be unexpected.
    taken: dict[str, Any] = {}
    for key in list(state_dict):
        if key.startswith(f"{name}."):
            taken[key.removeprefix(f"{name}.")] = state_dict.pop(key)
    if not all(isinstance(value, Tensor) for value in (weight, *taken.values())):
        return _refuse(state_dict, name, layer, _NO_TENSOR, errors)
    if taken:
        # Copied, as the state keeps references to them.
        found = {part: tensor.detach().clone() for part, tensor in taken.items()}
        wrong = _find_mismatch(weight, found, old, layer)
        if wrong:
            return _refuse(state_dict, name, layer, wrong, errors)
        functional: Any = require_bitsandbytes().functional
        new = functional.QuantState.from_dict(found, old.absmax.device)
    elif (plain := _plain_weight(weight, layer)) is not None:
        packed, new = pack(plain.to(old.absmax.device), old.quant_type, old.nested)
        state_dict[name] = _cut_like(layer.weight, packed)
    else:
        return _refuse(state_dict, name, layer, "is neither a plain weight nor quantised to 4 bits", errors)
    # Torch copies the packed weight after this hook.
    layer.weight.quant_state = layer.quant_state = new


def _find_mismatch(weight: Tensor, found: dict[str, Any], old: Any, layer: Any) -> str:
    """Describe a mismatch of loaded tensors; all sizes are checked, since the kernels do not check them."""
    settings = found.get(f"quant_state.bitsandbytes__{old.quant_type}")
    if settings is None:
        kinds = [part.partition("__")[2] for part in found if part.startswith("quant_state.")]
        return f"is quantised as {', '.join(kinds) or 'something unknown'}, and the layer as {old.quant_type}"
    if settings.dtype is not torch.uint8 or settings.numel() > _MOST_SETTINGS:
        return "has settings that cannot be read"
    blocks = -(-layer.out_features * layer.in_features // old.blocksize)
    nested = "nested_absmax" in found
    expected = {"absmax": (torch.float32, blocks), "quant_map": (torch.float32, 16)}
    if nested:
        expected["absmax"] = torch.uint8, blocks
        expected["nested_absmax"] = torch.float32, -(-blocks // NESTED_BLOCK)
        expected["nested_quant_map"] = torch.float32, 256
    if set(found) - set(expected) != {f"quant_state.bitsandbytes__{old.quant_type}"}:
        return f"has unknown parts: {', '.join(sorted(found))}"
    if (weight.dtype, weight.numel()) != (layer.weight.dtype, layer.weight.numel()):
        return f"is {list(weight.shape)} of {weight.dtype}, and in the layer {list(layer.weight.shape)}"
    for part, (dtype, size) in expected.items():
        tensor = found.get(part)
        if tensor is None or tensor.dtype != dtype or tensor.numel() != size:
            return f"has no {part} of {size} values in {dtype}"
    return _settings_that_differ(settings, layer, nested)


def _settings_that_differ(packed: Tensor, layer: object, nested: bool) -> str:
    unpack: Any = require_bitsandbytes().utils.unpack_tensor_to_dict
    try:
        settings = unpack(packed)
        wanted = {"blocksize": layer.quant_state.blocksize, "shape": [layer.out_features, layer.in_features]}
        if nested:
            wanted |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
            # Converted to fail here rather than when the kernel is called.
            float(settings["nested_offset"])
        differ = [f"{key}={settings[key]}" for key, value in wanted.items() if settings[key] != value]
        if f"torch.{settings['dtype']}" not in map(str, FLOATS):
            differ.append(f"dtype={settings['dtype']}")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        return "has settings that cannot be read"
    if not differ:
        return ""
    return f"has {', '.join(differ)}"


def load_8bit(layer: Any, state_dict: StateDict, prefix: str, metadata: StateDict, *rest: Any) -> None:
    """Load the row constants, or quantise a plain weight: a hook of ``load_state_dict``."""
    *_, errors = rest
    name = f"{prefix}weight"
    constants = state_dict.pop(f"{prefix}SCB", None)
    # Older files may have another layout than row-major.
    layout = state_dict.pop(f"{prefix}weight_format", 0)
    weight = state_dict.get(name)
    if weight is None:
        return
    settle_8bit_(layer)
    if not isinstance(weight, Tensor) or not isinstance(constants, Tensor | None):
        return _refuse(state_dict, name, layer, _NO_TENSOR, errors)
    if (plain := _plain_weight(weight, layer)) is not None:
        state_dict[name], constants = pack(plain.to(layer.weight.device), "int8", False)
    elif weight.dtype is not torch.int8 or constants is None or constants.shape != layer.state.SCB.shape:
        return _refuse(state_dict, name, layer, "is neither a plain weight nor quantised to int8", errors)
    elif not _is_row_major(layout):
        return _refuse(state_dict, name, layer, f"has an unsupported layout, weight_format={layout}", errors)
    layer.state.SCB = constants.detach().to(layer.weight.device, torch.float32, copy=True)
    # With ``assign=True`` the weight becomes this tensor; otherwise it is copied into memory that CB shares.
    if metadata.get("assign_to_params_buffers", False):
        layer.state.CB = state_dict[name]


def _is_row_major(layout: object) -> bool:
    if isinstance(layout, Tensor):
        return layout.numel() == 1 and layout.item() == 0
    return layout in (0, "row")


def _plain_weight(weight: Tensor, layer: Any) -> Tensor | None:
    """Return the weight to quantise, [out, in]; None if it is not a plain weight of this layer."""
    if was_transposed(layer) and weight.ndim == 2:
        weight = weight.T
    if weight.dtype not in FLOATS or weight.shape != (layer.out_features, layer.in_features):
        return None
    return weight.detach()


def _cut_like(weight: Tensor, packed: Tensor) -> Tensor:
    """Return this rank's shard of a packed weight that all ranks have, if the layer's weight is sharded."""
    if not isinstance(weight, DTensor):
        return packed
    # None: each rank selects its own shard without communication.
    return distribute_tensor(packed, weight.device_mesh, weight.placements, src_data_rank=None).to(weight.device)


def _refuse(state_dict: StateDict, name: str, layer: object, wrong: str, errors: list[str]) -> None:
    way_out = "Quantise with the same kind as the checkpoint, or load a checkpoint of the plain model"
    errors.append(explain(f"{name!r} in the checkpoint {wrong}", f"the layer is a {type(layer).__name__}", way_out))
    # The weight stays as it is, so that no other error is reported for it.
    state_dict[name] = layer.weight.detach()


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
