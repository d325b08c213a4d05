"""Trainable parameters of a module, and copies that take their places for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

# A parameter, and the modules and keys under which it is registered: several for a tied one.
Places = list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]


def find_trainable(module: nn.Module) -> Places:
    """List the parameters of ``module`` that require a gradient, each once, with the places that hold them.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> both = nn.Sequential(layer, layer)
        >>> [len(places) for _, places in find_trainable(both)]
        [1, 1]
    """
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(id(parameter), (parameter, []))[1].append((owner, key))
    return list(found.values())


@contextmanager
def in_place_of(places: Places, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let ``tensors`` stand for the parameters of ``places``: no hook of a parameter sees what is computed with them.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> with in_place_of(find_trainable(layer), [torch.tensor([[3.0]])]):
        ...     layer(torch.ones(1)).item()
        3.0
    """
    for (_, holders), tensor in zip(places, tensors, strict=True):
        for owner, key in holders:
            owner.__dict__["_parameters"][key] = tensor  # nn.Module's own way refuses what is not a Parameter
    try:
        yield
    finally:
        for parameter, holders in places:
            for owner, key in holders:
                owner.__dict__["_parameters"][key] = parameter
