"""Selection of the linear layers and stacks of matrices to quantise, with the reason why others are not."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.select import (
    PROMPT_ENCODER,
    TUNER,
    WRAPPER,
    Blocks,
    find_skipped,
    is_a,
    walk_around,
)
from lightning_fasttrain.finetune.quantized.quantized_layer import FLOATS, is_quantized, is_transposed
from lightning_fasttrain.finetune.selection.base_fingerprint import is_torchaos
from lightning_fasttrain.finetune.selection.targets import find_tied_modules
from lightning_fasttrain.finetune.selection.uncovered_weights import is_matrix, out_of_reach, read_past

_ADAPTERS = (TUNER, WRAPPER, PROMPT_ENCODER)
IN_ADAPTER = "it has an adapter already"


@dataclass(frozen=True)
class Quantizable:
    """Result of :func:`sort_out`, by qualified names.

    Args:
        layers: linear layers to quantise, including the ``Conv1D`` of GPT-2.
        stacks: tensors [n, rows, columns] to quantise → the module that holds the tensor, and its name there.
        already: layers that are quantised already.
        left: other layers and tensors → why they are not quantised.
    """

    layers: dict[str, Any]
    stacks: dict[str, tuple[nn.Module, str]]
    already: dict[str, nn.Module]
    left: dict[str, str]

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to quantise."""
        weights: dict[str, Any] = {name: layer.weight for name, layer in self.layers.items()}
        for name, (owner, key) in self.stacks.items():
            weights[name] = owner._parameters[key]
        return weights


def sort_out(model: nn.Module, kind: str, skip: Blocks) -> Quantizable:
    """Find the layers of ``model`` to quantise, those quantised already, and the others with the reason.

    Raises:
        ValueError: there is nothing to quantise; ``skip`` matches nothing.
        TypeError: ``skip`` contains anything other than patterns and classes.
    """
    skipped, heads = find_skipped(model, skip), find_heads(model)
    shared = {**_kept_whole(model), **_shared_modules(model)}
    shared.update(dict.fromkeys(read_past(model), "a kernel reads its weight without calling it"))
    layers: dict[str, Any] = {}
    already: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    # The outermost PEFT module that contains the current one; no name begins with "\0".
    adapter = "\0"
    for name, module in model.named_modules():
        if is_a(module, *_ADAPTERS) and not name.startswith(adapter):
            adapter = f"{name}."
        if is_quantized(module):
            already[name] = module
        elif isinstance(module, nn.Linear) or is_transposed(module):
            reason = _why_left(name, module, skipped, heads, shared)
            if name.startswith(adapter):
                # Other layers inside of the wrapper belong to the adapter.
                if name == f"{adapter}base_layer":
                    left[name] = reason or IN_ADAPTER
            elif reason:
                left[name] = reason
            else:
                layers[name] = module
    stacks = _stacks(model, skipped) if kind != "int8" else {}
    unreached = out_of_reach(model, skipped)
    reached = {*layers, *already, *left, *stacks}
    left.update({name: why for name, why in unreached.items() if not {name, f"{name}.weight"} & reached})
    if not layers and not already and not stacks:
        raise ValueError(_nothing_to_quantise(model, left))
    return Quantizable(layers, stacks, already, left)


def _stacks(model: nn.Module, skipped: set[str]) -> dict[str, tuple[nn.Module, str]]:
    """Find tensors of several matrices that modules multiply with in their own forward, such as experts."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in walk_around(model, lambda module: is_a(module, *_ADAPTERS)):
        # The weight of a Conv1d has three dimensions as well.
        if name in skipped or isinstance(module, _ConvNd):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and is_matrix(parameter) and parameter.dtype in FLOATS:
                found[f"{name}.{key}".lstrip(".")] = module, key
    return found


def _why_left(name: str, layer: nn.Module, skipped: set[str], heads: list[str], shared: dict[str, str]) -> str:
    """Return why a layer is not quantised; empty if it can be."""
    if name in skipped:
        return "skip"
    if name.removesuffix(".base_layer") in heads:
        return "a head"
    return shared.get(name) or _why_unfit(layer)


def _nothing_to_quantise(model: nn.Module, left: dict[str, str]) -> str:
    what = f"nothing to quantise in {type(model).__name__}"
    if not left:
        return explain(what, "it has no nn.Linear", "Remove the quantisation")
    reasons = ", ".join(f"{name} ({reason})" for name, reason in list(left.items())[:6])
    way_out = "Quantise before adapters are added, and skip fewer layers; only nn.Linear can be quantised"
    return explain(what, f"none of its matrices can be: {reasons}", way_out)


def _shared_modules(model: nn.Module) -> dict[str, str]:
    """Map each module that shares its weight with another one to that reason."""
    shared: dict[str, str] = {}
    for names in find_tied_modules(dict(model.named_modules())):
        for name in names:
            other = names[1] if name == names[0] else names[0]
            shared[name] = f"it shares its weight with {other}"
    return shared


def _kept_whole(model: nn.Module) -> dict[str, str]:
    """Map modules that Hugging Face models keep in float32, such as ``wo`` in T5, to that reason."""
    reasons: dict[str, str] = {}
    for prefix, owner in model.named_modules():
        kept = set(getattr(owner, "_keep_in_fp32_modules", None) or ())
        for name, _ in owner.named_modules():
            if kept.intersection(name.split(".")):
                reasons[f"{prefix}.{name}".lstrip(".")] = f"{type(owner).__name__} keeps it in float32"
    return reasons


def _why_unfit(layer: nn.Module) -> str:
    # A subclass may compute something else in its forward, which would be replaced with the class.
    if type(layer) is not nn.Linear and not is_transposed(layer):
        return f"it is a {type(layer).__name__}, not a plain nn.Linear"
    weight = layer._parameters.get("weight")
    if weight is not None and is_torchaos(weight):
        return "torchao has quantised it"
    if weight is None or is_traceable_wrapper_subclass(weight):  # such as a DTensor
        return "its weight is not a plain parameter"
    if weight.dtype not in FLOATS:
        return f"its weight is in {weight.dtype}"
    return ""
