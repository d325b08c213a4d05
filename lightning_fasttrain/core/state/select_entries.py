"""Select entries of named values such as a ``state_dict``, and the optimizer state that is kept by parameter."""

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


# The key of a dict of such values. Strategies that shard save them in shards, and load them in the current layout.
BY_PARAMETER = "by_parameter"


def find_by_parameter(state: object, path: tuple[object, ...] = ()) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the dicts under the key ``"by_parameter"`` in nested dicts, each with the keys that lead to it.

    Example:
        >>> find_by_parameter({"callbacks": {"mine": {"by_parameter": {"weight": 1}, "steps": 2}}})
        [(('callbacks', 'mine', 'by_parameter'), {'weight': 1})]
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if not isinstance(state, dict):
        return found
    for key, value in state.items():
        if key == BY_PARAMETER and isinstance(value, dict):
            found.append(((*path, key), value))
        else:
            found += find_by_parameter(value, (*path, key))
    return found


def replace_at(state: dict[Any, Any], path: tuple[object, ...], value: object) -> dict[Any, Any]:
    """Return ``state`` with another value at a path of keys; the dicts on the way are copied, and made where missing.

    Example:
        >>> replace_at({"a": {"b": 1}, "c": 2}, ("a", "b"), 3)
        {'a': {'b': 3}, 'c': 2}
    """
    first, *others = path
    if others:
        value = replace_at(state.get(first, {}), tuple(others), value)
    return {**state, first: value}
