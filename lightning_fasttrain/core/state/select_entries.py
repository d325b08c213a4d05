"""Select entries of named values, such as a ``state_dict``; the order of the values is kept."""

from collections.abc import Container, Mapping
from typing import Any, TypeVar

from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")


def only(values: Mapping[K, V], keys: Container[object]) -> dict[K, V]:
    """Return the entries whose key is among ``keys``.

    Example:
        >>> only({"lr": 0.1, "params": []}, ["lr"])
        {'lr': 0.1}
    """
    return {key: value for key, value in values.items() if key in keys}


def without(values: Mapping[K, V], keys: Container[object]) -> dict[K, V]:
    """Return the entries whose key is not among ``keys``.

    Example:
        >>> without({"lr": 0.1, "params": []}, ["params"])
        {'lr': 0.1}
    """
    return {key: value for key, value in values.items() if key not in keys}


def split_tensors(values: Mapping[K, object]) -> tuple[dict[K, Tensor], dict[K, Any]]:
    """Return the entries that are tensors, and all others."""
    tensors: dict[K, Tensor] = {}
    others: dict[K, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        else:
            others[key] = value
    return tensors, others
