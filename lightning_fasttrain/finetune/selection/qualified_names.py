"""Find modules, parameters and tensors by a property, and compare lists of qualified names."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_fasttrain.core.modules.select import is_inside


def find_modules(model: nn.Module, is_meant: Callable[[nn.Module], object]) -> dict[str, Any]:
    """Map all names of the modules for which ``is_meant`` returns a true value to these modules."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if is_meant(module)}


def list_trainable(model: nn.Module) -> list[str]:
    """Return the names of the parameters that require a gradient."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def has_fake_parameters(model: nn.Module) -> bool:
    """Check whether ``model`` holds fake tensors, as it does while a run is predicted."""
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def names_in(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return those ``names`` that are among ``others``, in their order."""
    return [name for name in names if name in others]


def names_not_in(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return those ``names`` that are not among ``others``, in their order."""
    return [name for name in names if name not in others]


def names_outside(names: Iterable[str], modules: Collection[str]) -> list[str]:
    """Return the ``names`` that do not belong to a part of one of the ``modules``, in their order."""
    return [name for name in names if not is_inside(name, modules)]


def strip_prefix(names: Iterable[str], prefix: str) -> list[str]:
    """Return the ``names`` without ``prefix``; a name that does not begin with it stays as it is."""
    return [name.removeprefix(prefix) for name in names]


def prefix_of(name: str) -> str:
    """Return the name of a module with a dot, which begins the names of its parts; "" for the model, named ""."""
    return f"{name}.".removeprefix(".")


def first_tensor(leaves: Iterable[object]) -> Tensor:
    """Return the first tensor among the leaves of a structure, which must hold one."""
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))
