"""Walk through a batch of any structure: its leaves, their paths, and its number of samples."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_fasttrain.core.messages import explain


def batch_size(batch: object) -> int:
    """Return the number of samples in ``batch``, by the rule of :func:`~lightning_fasttrain.data.split_batch`.

    Raises:
        ValueError: there is no tensor with a batch axis, it is 0, or two tensors disagree.

    Example:
        >>> import torch
        >>> batch_size((torch.zeros(3, 2), torch.zeros(3)))
        3
    """
    lengths: dict[str, int] = {}
    for path, leaf in list_leaves(batch).items():
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            lengths[path] = leaf.shape[0]
    if not lengths:
        why = "it holds no tensor with a batch axis"
        way_out = "Return tensors from the loader, or give MicroBatching a split= function"
        raise ValueError(explain(f"a batch of type {type(batch).__name__} cannot be split", why, way_out))
    first, size = next(iter(lengths.items()))
    if size == 0:
        why = "the mean loss of an empty batch is NaN"
        raise ValueError(explain(f"{first} has 0 samples", why, "Remove empty batches"))
    for path, length in lengths.items():
        if length != size:
            raise ValueError(
                explain(
                    f"{path} has {length} rows where {first} has {size}",
                    "every tensor is split along its first axis, so all must have the same length",
                    "Pad it to one row per sample, wrap it in an object of your own to repeat it in every micro-batch, "
                    "or give MicroBatching a split= function",
                )
            )
    return size


def can_be_cut(batch: object) -> bool:
    """Whether a batch can be split into samples, by the rule of :func:`~lightning_fasttrain.data.split_batch`."""
    try:
        return batch_size(batch) > 0
    except ValueError:
        return False


def list_leaves(value: object, path: str = "batch") -> dict[str, Any]:
    """Return the leaves of a batch, or of any arguments and outputs, by their paths.

    Example:
        >>> list_leaves({"ids": [1, 2], "name": "train"})
        {"batch['ids']": [1, 2], "batch['name']": 'train'}
    """
    found: dict[str, Any] = {}

    def note(leaf: object, path: str) -> Any:
        found[path] = leaf
        return leaf

    walk_leaves(value, note, path)
    return found


def list_tensors(value: object, path: str = "batch") -> dict[str, Tensor]:
    """Return the tensors among the leaves by their paths."""
    return {place: leaf for place, leaf in list_leaves(value, path).items() if isinstance(leaf, Tensor)}


def walk_leaves(value: object, visit: Callable[[Any, str], object], path: str) -> Any:
    """Rebuild ``value`` with every leaf replaced by ``visit(leaf, path)``; containers keep their type."""
    if isinstance(value, Tensor):
        if value.is_nested or value.is_sparse:
            way_out = "Give MicroBatching a split= function"
            raise ValueError(explain(f"{path} is a nested or sparse tensor", "it has no rows to split", way_out))
        return visit(value, path)
    if isinstance(value, PackedSequence):
        why = "each of its rows holds a time step of all samples"
        raise ValueError(explain(f"{path} is a PackedSequence", why, "Pack inside the model, after the split"))
    if isinstance(value, Mapping):
        parts = {key: walk_leaves(item, visit, f"{path}[{key!r}]") for key, item in value.items()}
        return _with_items(value, parts)
    if isinstance(value, list | tuple):
        if value and all(map(_is_plain, value)):
            return visit(value, path)
        items = [walk_leaves(item, visit, f"{path}[{i}]") for i, item in enumerate(value)]
        if hasattr(value, "_fields"):  # a named tuple takes its items as separate arguments
            return type(value)(*items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            part = walk_leaves(getattr(value, field.name), visit, f"{path}.{field.name}")
            object.__setattr__(result, field.name, part)  # also works for a frozen dataclass
        return result
    return visit(value, path)


def _with_items(mapping: Mapping[object, object], items: dict[object, object]) -> Any:
    if type(mapping) is dict:
        return items
    result: Any = copy.copy(mapping)  # keeps the type and other attributes
    try:
        for key, item in items.items():
            result[key] = item
    except TypeError:  # a read-only mapping
        return items
    return result


def _is_plain(value: object) -> bool:
    """Whether a collate function leaves this value in a list with one entry per sample."""
    return isinstance(value, str | bytes | int | float | complex) or (
        value is not None
        and not isinstance(value, Tensor | np.ndarray | Mapping | list | tuple)
        and not dataclasses.is_dataclass(value)
    )
