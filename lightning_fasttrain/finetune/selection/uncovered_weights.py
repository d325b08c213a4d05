"""Weights that quantisation and adapters on linear layers do not cover, with their share of the bytes."""

from collections.abc import Collection

from torch import nn

from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.core.modules.select import find_tuners, is_inside, is_linear, stands_for
from lightning_fasttrain.finetune.selection.freezing import can_train
from lightning_fasttrain.finetune.selection.qualified_names import (
    find_modules,
    names_in,
    names_not_in,
    names_outside,
)

_MUCH = 0.1  # of all bytes: then it is worth a warning


def read_past(model: nn.Module) -> list[str]:
    """Return the names of linear layers of state-space models (Mamba) whose weights a kernel reads directly.

    On a CPU some of these layers are called, on CUDA only ``in_proj`` is, so an adapter on the others may have no
    effect.
    """
    found: list[str] = []
    for mixer, module in model.named_modules():
        if "A_log" in module._parameters:
            for name, child in module.named_children():
                if is_linear(child) and name != "in_proj":
                    found.append(f"{mixer}.{name}")
    return found


def out_of_reach(model: nn.Module, skipped: Collection[str] = ()) -> dict[str, str]:
    """Map each layer or tensor that holds a matrix and is neither ``nn.Linear`` nor an embedding to a description."""
    adapters = list(find_tuners(model))
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | nn.Embedding | nn.EmbeddingBag)
            or name in skipped
            or is_inside(name, adapters)
        ):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter):
                kind = type(module).__name__
                named, why = f"{name}.{key}".lstrip("."), f"it is a tensor of {kind}"
                if key == "weight":
                    named, why = name, f"it is a {kind}"
                found[named] = f"{why}, not an nn.Linear"
    return found


def is_matrix(parameter: nn.Parameter) -> bool:
    """Check whether a parameter maps vectors to vectors; position embeddings [1, n, d] do not."""
    return can_train(parameter) and parameter.ndim > 1 and parameter.shape[0] > 1


def shares_of(model: nn.Module, names: Collection[str]) -> dict[str, float]:
    """Return the share of each layer or tensor in the bytes of all parameters."""
    total = bytes_of(model.parameters())
    parts = dict(model.named_modules())
    sizes = {}
    for name in names:
        own = parts[name].parameters() if name in parts else [model.get_parameter(name)]
        sizes[name] = bytes_of(own) / max(total, 1)
    return sizes


def warn_of_what_is_out_of_reach(model: nn.Module, left: Collection[str], shares: dict[str, float]) -> None:
    """Warn if at least 10% of the bytes are in matrices that are not quantised since they are in no linear layer."""
    names = names_in(out_of_reach(model), left)
    if (share := sum(map(shares.__getitem__, names))) >= _MUCH:
        what = f"{share:.0%} of the bytes of {type(model).__name__} stay in full precision"
        why = f"only nn.Linear is quantised, and these are in other modules: {list_some(names)}"
        warn(explain(what, why, "Plan for their size; model.bfloat16() halves that of float32 weights"))


def describe_uncovered(model: nn.Module, adapted: Collection[str]) -> str:
    """Report the parts of the model, if large, that have no adapter since they are in no linear layer."""
    stacks = names_outside(find_modules(model, stands_for), list(find_tuners(model)))  # quantised, of matrices
    names = names_not_in([*out_of_reach(model), *stacks], adapted)
    share = sum(shares_of(model, names).values())
    passed = names_not_in(read_past(model), adapted)
    said = ""
    if share >= _MUCH:
        said += f"; without adapter, since not in a linear layer: {list_some(names)} ({share:.0%} of all bytes)"
    if passed:
        said += f"; without adapter, since a kernel reads their weights: {list_some(passed)}"
    return said
