"""Find PEFT's layers and the original weights of merged ones, and merge adapters into quantised layers."""

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import find_tuners, is_inside, is_tuner, walk_around
from lightning_fasttrain.core.modules.wrapped_forward import Replacement
from lightning_fasttrain.finetune.adapters.add_adapter import adapted_modules, adapter_parameters
from lightning_fasttrain.finetune.adapters.initializations import call, copy_config_for, in_eval
from lightning_fasttrain.finetune.quantized.load_quantized import Original, OriginalWeights, relative_error
from lightning_fasttrain.finetune.quantized.quantized_layer import (
    dequantize_4bit,
    dequantized_weight,
    in_8_bits,
    is_quantized,
    quantize_layer_,
    quantized_bytes,
    round_bias_,
    was_transposed,
)
from lightning_fasttrain.finetune.quantized.quantized_tensor import (
    dequantize_tensor,
    held_tensors,
    hold_,
    holder_under,
    keep_quantized_,
    let_go_,
    quantize_tensor_,
)
from lightning_fasttrain.finetune.selection.base_fingerprint import find_modules, names_in, prefix_of
from lightning_fasttrain.finetune.selection.float32_adapters import trained_copies
from lightning_fasttrain.finetune.selection.freezing import can_train

WAYS = ("requantized", "dequantized", "original")
_PROBES = 64  # random inputs per layer for measuring the error, if no batch is given
_MOST_PROBES = 1024  # inputs per layer taken from a given batch


def check_way(model: nn.Module, quantized: Mapping[str, object], into: str | None, original: Original | None) -> None:
    """Check that ``into`` and ``original`` are given exactly if there are quantised layers to merge into.

    Raises:
        ValueError: an argument is missing or unused; the message lists the ways to merge and their costs.
    """
    if into is not None:
        one_of("into", into, WAYS)
    if not quantized:
        if into is not None or original is not None:
            why = "no adapted layer is quantised"
            raise ValueError(explain(f"into={into!r}", why, "Remove into= and original="))
        return
    if into is None:
        raise ValueError(_which_way(model, quantized))
    if into == "original" and original is None:
        why = "the original weights are needed, and quantising did not keep them"
        raise ValueError(explain("into='original'", why, "Pass original= a module, state dict or safetensors file"))
    if into != "original" and original is not None:
        raise ValueError(explain(f"original= with into='{into}'", "it would not be used", "Use into='original'"))


def forget_quantization_(root: nn.Module) -> None:
    """Remove a Hugging Face model's quantization config if no layer is quantised, so that it can be moved and saved."""
    quantizer: Any = vars(root).get("hf_quantizer")
    if quantizer is None or any(map(is_quantized, root.modules())):
        return
    quantizer.remove_quantization_config(root)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
        vars(root).pop(flag, None)


class QuantizedMerge:
    """Merge of adapters into quantised layers, one by one, with the measured error of each.

    Attributes:
        against_trained: name of the layer → relative difference of its outputs to its outputs before merging.
        against_original: name of the layer → relative difference of its outputs to those of the original weights with
            the unmerged adapter.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, object], into: str | None, original: Original | None, batch: object
    ) -> None:
        self.into, self.dtype = into, _dtype_of(model, layers)
        self.configs = {name: _configs_of(model, name) for name in layers}
        self.originals: OriginalWeights | None = None
        if into == "original" and original is not None:
            tensors = [f"{name}.{tensor}" for name, layer in layers.items() for tensor in find_quantized_under(layer)]
            self.originals = OriginalWeights(original, tensors)
        linear: dict[str, Any] = {}
        for name, layer in layers.items():
            base = layer.get_base_layer()
            if is_quantized(base):
                # Otherwise the outputs below are wrong on some CPUs.
                keep_quantized_(base)
                linear[name] = layer
        self.inputs: dict[str, Tensor] = {}
        if layers and batch is not None:
            self.inputs = _inputs(model, linear, batch)
        self.against_trained: dict[str, float] = {}
        self.against_original: dict[str, float] = {}

    @torch.no_grad()
    def merge_layer(self, name: str, layer: Any, names: list[str]) -> nn.Module:
        """Return the merged layer that replaces the quantised one under ``layer``."""
        base = layer.get_base_layer()
        x = self.inputs.get(name)
        if x is None:
            # A generator on the host: probes are equal on every device, and the global random state is unchanged.
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(_PROBES, base.in_features, generator=generator)
        x = x.to(base.weight.device, self.dtype)
        trained = _output(layer, x)
        weight, bias = _full_weight(base), base.bias
        if self.originals is not None:
            weight, bias = self.originals.read_weight(name, base, weight)
        twin = _plain_twin(layer, _linear(weight, bias), self.configs[name], names)
        beside = None
        if self.originals is not None:
            beside = _output(twin, x.to(weight.dtype))
        # ``safe_merge`` raises if the sum is not finite.
        twin.merge(safe_merge=True, adapter_names=names)
        merged = twin.get_base_layer()
        merged = _quantized_like(base, merged) if self.into == "requantized" else merged.to(self.dtype)
        if was_transposed(base):
            merged = _transposed_again(merged)
        merged.train(base.training)
        result = _output(merged, x)
        self.against_trained[name] = relative_error(result, trained)
        if beside is not None:
            self.against_original[name] = relative_error(result, beside)
        return merged

    @torch.no_grad()
    def merge_tensor(self, name: str, wrapper: object, names: list[str]) -> None:
        """Merge into a tensor that is held in 4 bits, such as a layer's experts, in place.

        The error is measured on the weights, which is the mean error of the outputs for normally distributed inputs.
        """
        owner, key, holder = wrapper.get_base_layer(), wrapper.parameter_name, holder_under(wrapper)
        whole, state = f"{name}.{key}", holder.quant_state
        weight = _full_weight(holder).view(holder.stands_for)
        changes = [wrapper.get_delta_weight(one) for one in names]
        trained = sum(changes, weight)  # in float32
        if self.originals is not None:
            weight, _ = self.originals.read_weight(name, holder, weight, whole)
        merged = weight.clone()
        for change in changes:
            merged += change.to(merged.dtype)
        if not merged.isfinite().all():
            raise ValueError(f"NaNs in '{whole}'")  # same message as PEFT
        if self.originals is not None:
            self.against_original[whole] = relative_error(merged.float(), sum(changes, weight.float()))
        if self.into == "requantized":
            again = quantize_tensor_(owner, key, merged.to(state.dtype), state.quant_type, state.nested)
            merged = dequantize_tensor(again)
        else:
            merged = merged.to(self.dtype)
            let_go_(owner, key, merged)
        self.against_trained[whole] = relative_error(merged.float(), trained)


def _plain_twin(layer: object, plain: nn.Linear, configs: dict[str, Any], names: list[str]) -> Any:
    """Return PEFT's layer for ``plain``, which shares the adapters of the quantised ``layer``."""
    import peft

    holder = nn.Module()
    holder.base = plain
    there = names_in(names, list_adapters(layer))
    scaled = {"base"} if getattr(layer, "is_feedforward", False) else set[str]()
    # PEFT has warned when the adapter was added, and would now miss the other targets of its configuration.
    with warnings.catch_warnings(action="ignore"):
        for name in there:
            config = copy_config_for(configs[name], {"base"}, scaled)
            if hasattr(config, "trainable_token_indices"):
                config.trainable_token_indices = None
            peft.inject_adapter_in_model(config, holder, adapter_name=name)
    twin: Any = holder.base
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        if attribute in vars(layer) or attribute in layer._modules:
            setattr(twin, attribute, getattr(layer, attribute))
    twin.set_adapter(there, inference_mode=True)
    return twin


def _quantized_like(base: object, merged: nn.Linear) -> nn.Module:
    layer: Any
    weight = merged.weight.detach()
    if in_8_bits(base):
        layer = _linear(weight, merged.bias)
        quantize_layer_(layer, weight, "int8", False, None)
        # Columns of inputs above the threshold are multiplied in 16 bits.
        layer.state.threshold = base.state.threshold
    else:
        state = base.weight.quant_state
        weight = weight.to(state.dtype)  # the dtype after dequantising
        layer = _linear(weight, merged.bias)
        quantize_layer_(layer, weight, state.quant_type, state.nested, base.compute_dtype)
        if base.compute_dtype is not None:
            round_bias_(layer)
    keep_quantized_(layer)
    return layer


def _transposed_again(layer: Any) -> nn.Module:
    """Return GPT-2's kind of layer, with the weight [in, out], so that its files keep their layout."""
    if is_quantized(layer):
        layer.was_transposed = True
        return layer
    from transformers.pytorch_utils import Conv1D

    plain = Conv1D(layer.out_features, layer.in_features)
    plain.weight = nn.Parameter(layer.weight.T.contiguous(), requires_grad=False)
    plain.bias = layer.bias
    return plain


def _full_weight(base: object) -> Tensor:
    """Return the dequantised weight of a layer in float32, regardless of the dtype before quantising."""
    weight = dequantized_weight(base)
    if weight.dtype is not torch.float32:
        weight = dequantize_4bit(base.weight.data, base.weight.quant_state, torch.float32)
    return weight


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(weight.dtype, copy=True), requires_grad=False)
    return layer


def _dtype_of(model: nn.Module, layers: Mapping[str, object]) -> torch.dtype:
    """Return the activations' dtype: the most common one of parameters that are not quantised nor an adapter's."""
    brought, counts = adapter_parameters(model), Counter[torch.dtype]()

    for name, parameter in model.named_parameters():
        if name not in brought and not is_inside(name, layers) and can_train(parameter):
            counts[parameter.dtype] += parameter.numel()
    if counts:
        return counts.most_common(1)[0][0]
    for layer in layers.values():
        dtype = getattr(layer.get_base_layer(), "compute_dtype", None)
        if dtype is not None:
            return dtype
    return torch.float32


def _configs_of(model: nn.Module, name: str) -> dict[str, Any]:
    inner = [root for prefix, root in adapted_modules(model).items() if name.startswith(prefix_of(prefix))]
    # The last is the innermost, as ``named_modules`` lists outer modules first.
    return vars(inner[-1])["peft_config"]


def list_adapters(layer: object) -> set[str]:
    """Return the names of the adapters in one of PEFT's layers; other layers may have other adapters."""
    return {name for attribute in layer.adapter_layer_names for name in getattr(layer, attribute)}


def _inputs(model: nn.Module, layers: Mapping[str, object], batch: object) -> dict[str, Tensor]:
    """Return the inputs of each layer when the model is called with ``batch``."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def keep(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:  # name: of this iteration
            # If a layer is called several times, the first call is kept.
            seen.setdefault(name, args[0].detach().flatten(0, -2)[:_MOST_PROBES])

        handles.append(layer.register_forward_pre_hook(keep))
    try:
        with in_eval(model):
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _output(module: nn.Module, x: Tensor) -> Tensor:
    with in_eval(module):
        return module(x).float()


def _which_way(model: nn.Module, quantized: Mapping[str, object]) -> str:
    dtype, packed, plain = _dtype_of(model, quantized), 0, 0
    for layer in quantized.values():
        for base in find_quantized_under(layer).values():
            kind = "int8" if in_8_bits(base) else "nf4"
            packed += quantized_bytes(base.out_features, base.in_features, kind)
            plain += base.out_features * base.in_features * dtype.itemsize
    sizes = f"{plain / 2**20:.1f} MiB in {str(dtype).removeprefix('torch.')} instead of {packed / 2**20:.1f}"
    return explain(
        f"merging into {len(quantized)} quantised layers, the first '{next(iter(quantized))}'",
        "quantised weights cannot hold the sum exactly, and there are several ways to merge",
        "Use into='requantized', which rounds the sum again, with about the error of the first quantization; or "
        f"into='original' with original= the full-precision weights, which is exact and takes {sizes}; or "
        "into='dequantized', of the same size, which gives the model as it was trained",
    )


def tuner_layers(model: nn.Module) -> dict[str, Any]:
    """Map qualified names to PEFT's outermost layers.

    Raises:
        ValueError: the model has no such layer.
    """
    adapted_modules(model)
    layers = {name: layer for name, layer in walk_around(model, is_tuner) if is_tuner(layer)}
    if not layers:
        why = "virtual tokens are prepended to the input and cannot be merged into weights"
        way_out = "Save them, and unload them: unload_adapters_(model, merge=False)"
        raise ValueError(explain(f"merging the prompts of {type(model).__name__}", why, way_out))
    return layers


def find_trained_copies(model: nn.Module) -> dict[str, Any]:
    """Map qualified names to PEFT's wrappers that hold a fully trained copy of a module for each adapter."""
    return find_modules(model, trained_copies)


class Originals(Replacement):
    """Replacement of a merged layer's ``unmerge`` that holds the original weights."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        # DoRA's merge stores a norm there for PEFT's unmerge.
        self.caches = dict(vars(layer).get("_caches", {}))
        self.trained: list[nn.Parameter] = []
        # LN tuning merges by exchanging two modules.
        self.exchanges = "ln_tuning_layers" in layer._modules
        # Merging replaces a quantised layer rather than writing to it, so keeping the layer is enough.
        self.base = layer.base_layer if is_quantized(layer.base_layer) else None
        self.owner = layer.get_base_layer()
        self.held = held_tensors(self.owner)
        self.weights: list[tuple[nn.Module, str, Tensor]] = []
        if self.base is not None:
            return
        bases = dict.fromkeys(module.get_base_layer() for module in find_tuners(layer).values())
        for base in bases:
            for name, parameter in base.named_parameters(recurse=False):
                # A real copy: on the CPU, ``to`` alone returns the same memory.
                self.weights.append((base, name, parameter.detach().to("cpu", copy=True)))

    def __call__(self) -> None:
        if self.base is not None:
            # The model may have moved since.
            self.module.base_layer = self.base.to(self.module.base_layer.weight.device)
        if self.exchanges and self.module.merged:
            type(self.module).unmerge(self.module)
        for name, holder in self.held.items():
            hold_(self.owner, name, holder)
        # PEFT's attention turns its weights into parameters again when called.
        tuners = find_tuners(self.module)
        for base, name, tensor in self.weights:
            parameter = base.get_parameter(name)
            parameter.data = tensor.to(parameter.device, parameter.dtype)
        for module in tuners.values():
            module.merged_adapters.clear()
        if "_caches" in vars(self.module):
            self.module._caches = self.caches
        for parameter in self.trained:
            parameter.requires_grad_(True)
        # This removes the object itself; PEFT's own method belongs to the class.
        vars(self.module).pop("unmerge", None)


def wrappers_in(layer: Any) -> list[Any]:
    """Return PEFT's nested layers for the tensors of one module; else the ``layer`` alone."""
    found = [layer]
    while hasattr(found[-1], "parameter_name") and is_tuner(found[-1].base_layer):
        found.append(found[-1].base_layer)
    return found


def find_quantized_under(layer: Any) -> dict[str, Any]:
    """Map the quantised tensors that one of PEFT's layers adapts to the quantised layers that hold them."""
    base = layer.get_base_layer()
    if is_quantized(base):
        return {"weight": base}
    adapted = [vars(wrapper).get("parameter_name") for wrapper in wrappers_in(layer)]
    return {name: holder for name, holder in held_tensors(base).items() if name in adapted}
