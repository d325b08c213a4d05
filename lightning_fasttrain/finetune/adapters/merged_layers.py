"""Find PEFT's layers in a model, and keep the original weights of merged ones."""

from typing import Any

from torch import Tensor, nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import find_tuners, is_tuner, walk_around
from lightning_fasttrain.core.modules.wrapped_forward import Replacement
from lightning_fasttrain.finetune.adapters.add_adapter import adapted_modules
from lightning_fasttrain.finetune.quantized.quantized_layer import is_quantized
from lightning_fasttrain.finetune.quantized.quantized_tensor import held_tensors, hold_
from lightning_fasttrain.finetune.selection.adapter_switches import trained_copies
from lightning_fasttrain.finetune.selection.qualified_names import find_modules


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
