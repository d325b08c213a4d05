"""Saving, loading, copying, pickling and moving of quantised layers."""

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, wrapper_on
from lightning_fasttrain.finetune.quantized.quantized_layer import (
    FLOATS,
    NESTED_BLOCK,
    dequantize_4bit,
    in_8_bits,
    is_quantized,
    pack,
    require_bitsandbytes,
    settle_4bit_,
    settle_8bit_,
    was_transposed,
)

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
