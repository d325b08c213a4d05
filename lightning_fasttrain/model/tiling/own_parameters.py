"""Trainable parameters of a module, and copies that take their places for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

# The modules and keys under which each parameter is registered: several for a tied one.
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def find_trainable(module: nn.Module) -> Places:
    """List the parameters of ``module`` that require a gradient, each once, with the places that hold them.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> both = nn.Sequential(layer, layer)
        >>> list(map(len, find_trainable(both).values()))
        [1, 1]
    """
    found: Places = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(parameter, []).append((owner, key))
    return found


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
    for holders, tensor in zip(places.values(), tensors, strict=True):
        for owner, key in holders:
            owner.__dict__["_parameters"][key] = tensor  # nn.Module's own way refuses what is not a Parameter
    try:
        yield
    finally:
        for parameter, holders in places.items():
            for owner, key in holders:
                owner.__dict__["_parameters"][key] = parameter
