"""Kinds of layers: linear ones, and those of PEFT, transformers and bitsandbytes, none of which is imported here."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn

TUNER = "peft.tuners.tuners_utils.BaseTunerLayer"
WRAPPER = "peft.utils.other.AuxiliaryTrainingWrapper"  # around a module that trains in full, or single rows of it
PROMPT_ENCODER = "peft.tuners.tuners_utils.BasePromptEncoder"
HUGGING_FACE_MODEL = "transformers.modeling_utils.PreTrainedModel"
CONV1D = "transformers.pytorch_utils.Conv1D"


def find_imported_class(name: str) -> type[Any] | None:
    """Return the class of this dotted name; None while its file has not been imported.

    Until then no module can be an instance of it, so optional packages are never imported for the question.

    Example:
        >>> find_imported_class("torch.nn.Linear"), find_imported_class("nowhere.Linear")
        (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    home, _, own = name.rpartition(".")
    return getattr(sys.modules.get(home), own, None)


def is_a(module: object, *names: str) -> bool:
    """Check whether a module or tensor is an instance of one of these classes of optional packages.

    Example:
        >>> is_a(nn.Linear(1, 1), TUNER, "torch.nn.Linear")
        True
    """
    kinds = filter(None, map(find_imported_class, names))
    return isinstance(module, tuple(kinds))


def is_tuner(module: object) -> bool:
    """Check whether ``module`` is one of PEFT's layers, which holds the layer that it adapts."""
    return is_a(module, TUNER)


def find_tuners(model: nn.Module) -> dict[str, Any]:
    """Map qualified names to PEFT's layers in ``model``, also to those inside others."""
    return {name: module for name, module in model.named_modules() if is_tuner(module)}


def walk_around(model: nn.Module, closed: Callable[[nn.Module], bool]) -> Iterator[tuple[str, Any]]:
    """Iterate over names and modules as ``named_modules`` does, without those inside of modules that are ``closed``.

    The model itself is always entered.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
        >>> [name for name, _ in walk_around(net, lambda module: isinstance(module, nn.Sequential))]
        ['', '0', '1']
    """
    inside = "\0"  # no name begins with it
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if closed(module):
            inside = f"{name}."
        yield name, module


def base_of(module: nn.Module) -> nn.Module:
    """Return the layer under an adapter, or the module itself."""
    return cast(Any, module).get_base_layer() if is_tuner(module) else module


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name → module, without what an adapter brought; an adapted layer is represented by its base."""
    found: dict[str, nn.Module] = {}
    for name, module in walk_around(model, lambda module: is_a(module, TUNER, PROMPT_ENCODER)):
        if name and not stands_for(module) and not is_a(module, PROMPT_ENCODER):
            found[name] = base_of(module)
    return found


def is_linear(layer: nn.Module) -> bool:
    """Check whether ``layer`` is an ``nn.Linear``, a quantised descendant of it, or GPT-2's transposed one.

    Those inside ``nn.MultiheadAttention`` are not, since it computes with their weights and never calls them.
    """
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear) or stands_for(layer):
        return False
    return isinstance(layer, nn.Linear) or is_a(layer, CONV1D)


def stands_for(layer: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the tensor that a quantised layer holds for another module, which alone uses it; else None.

    By ``vars``: an adapter's wrapper passes on the attributes of the layer that it holds.
    """
    return vars(layer).get("stands_for")
