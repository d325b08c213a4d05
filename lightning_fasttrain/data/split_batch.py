"""Cut a batch of any shape into parts of samples."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.messages import explain


def split_batch(batch: Any, n: int) -> list[Any]:
    """Cut ``batch`` into ``n`` parts of neighbouring samples, whose sizes differ by one at most.

    The rule: the first axis of every tensor (or NumPy array) with an axis is the samples' axis, and all of them
    agree on its length B. So does a list or tuple of B plain values such as strings. Everything else, from
    0-dimensional tensors to strings, None and your own objects, is kept whole in every part. Tuples, lists,
    mappings (``BatchEncoding`` too), dataclasses and named tuples are walked and keep their type; tensors are cut
    without copying.

    Args:
        batch: tensors of shape (B, ...), in any nesting.
        n: number of parts, at least 1. A batch of fewer than n samples gives one part a sample.

    Returns:
        ``min(n, B)`` batches of the same structure.

    Raises:
        ValueError: nothing to cut, no samples, or a leaf of another length; the message names the leaf.

    Example:
        >>> import torch
        >>> parts = split_batch({"x": torch.arange(5), "name": "train"}, 2)
        >>> [(part["x"].tolist(), part["name"]) for part in parts]
        [([0, 1, 2], 'train'), ([3, 4], 'train')]
    """
    positive_int("n", n)
    size = batch_size(batch)
    stops = list(itertools.accumulate(split_sizes(size, n)))
    return [_rows(batch, start, stop, size) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def split_sizes(size: int, n: int) -> list[int]:
    """The numbers of samples of ``n`` parts, which differ by one at most; one for each sample where there are fewer.

    Example:
        >>> split_sizes(5, 2), split_sizes(2, 4)
        ([3, 2], [1, 1])
    """
    share, rest = divmod(size, min(n, size))
    return [share + (part < rest) for part in range(min(n, size))]


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of ``batch``, by the rule of :func:`split_batch`.

    Example:
        >>> import torch
        >>> take_rows((torch.arange(5), "train"), 1, 3)
        (tensor([1, 2]), 'train')
    """
    return _rows(batch, start, stop, batch_size(batch))


def pick_rows(batch: Any, rows: list[int]) -> Any:
    """The samples with these numbers, in their order, by the rule of :func:`split_batch`; a sample may come twice.

    Example:
        >>> import torch
        >>> pick_rows((torch.arange(5), ["a", "b", "c", "d", "e"]), [4, 0, 4])
        (tensor([4, 0, 4]), ['e', 'a', 'e'])
    """
    size = batch_size(batch)

    def pick(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            return leaf[rows]
        if isinstance(leaf, list | tuple) and len(leaf) == size:
            return type(leaf)(leaf[row] for row in rows)
        return leaf

    return walk_leaves(batch, pick, "batch")


def reverse_rows(batch: Any) -> Any:
    """The samples of ``batch`` in reverse order, by the rule of :func:`split_batch`.

    Example:
        >>> import torch
        >>> reverse_rows((torch.arange(3), ["a", "b", "c"]))
        (tensor([2, 1, 0]), ['c', 'b', 'a'])
    """
    size = batch_size(batch)

    def turn(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.flip(0)
        if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
            return leaf[::-1].copy()  # torch takes no arrays with negative strides
        if isinstance(leaf, list | tuple) and len(leaf) == size:
            return leaf[::-1]
        return leaf

    return walk_leaves(batch, turn, "batch")


def batch_size(batch: Any) -> int:
    """Number of samples in ``batch``, by the rule of :func:`split_batch`.

    Raises:
        ValueError: there is no tensor to tell it, it is 0, or two tensors disagree.

    Example:
        >>> import torch
        >>> batch_size((torch.zeros(3, 2), torch.zeros(3)))
        3
    """
    lengths: dict[str, int] = {}

    def note(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            lengths[path] = leaf.shape[0]
        return leaf

    walk_leaves(batch, note, "batch")
    if not lengths:
        why = "it holds no tensor with a samples' axis"
        way_out = "Return tensors from the loader, or give MicroBatching a split= function of your own"
        raise ValueError(explain(f"a batch of type {type(batch).__name__} cannot be split", why, way_out))
    first, size = next(iter(lengths.items()))
    if size == 0:
        why = "the mean loss of nothing is not a number"
        raise ValueError(explain(f"{first} has 0 samples", why, "Leave empty batches out"))
    for path, length in lengths.items():
        if length != size:
            raise ValueError(
                explain(
                    f"{path} has {length} rows where {first} has {size}",
                    "every tensor is cut along its first axis, so all must agree on it",
                    "Pad it to one row a sample, wrap it in an object of your own to keep it whole, "
                    "or give MicroBatching a split= function",
                )
            )
    return size


def _rows(batch: Any, start: int, stop: int, size: int) -> Any:
    def cut(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            return leaf[start:stop]
        if isinstance(leaf, list | tuple) and len(leaf) == size:
            return leaf[start:stop]
        return leaf

    return walk_leaves(batch, cut, "batch")


def walk_leaves(value: Any, visit: Callable[[Any, str], Any], path: str) -> Any:
    """Rebuild ``value`` with every leaf replaced by ``visit(leaf, path)``; containers keep their type."""
    if isinstance(value, Tensor):
        if value.is_nested or value.is_sparse:
            way_out = "Give MicroBatching a split= function of your own"
            raise ValueError(explain(f"{path} is a nested or sparse tensor", "it has no rows to cut along", way_out))
        return visit(value, path)
    if isinstance(value, PackedSequence):
        why = "its rows are time steps of all samples together"
        raise ValueError(explain(f"{path} is a PackedSequence", why, "Pack inside the model, after the split"))
    if isinstance(value, Mapping):
        parts = {key: walk_leaves(item, visit, f"{path}[{key!r}]") for key, item in value.items()}
        return _with_items(value, parts)
    if isinstance(value, list | tuple):
        if value and all(_is_plain(item) for item in value):
            return visit(value, path)
        items = [walk_leaves(item, visit, f"{path}[{i}]") for i, item in enumerate(value)]
        if hasattr(value, "_fields"):  # a named tuple takes its items one by one
            return type(value)(*items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            part = walk_leaves(getattr(value, field.name), visit, f"{path}.{field.name}")
            object.__setattr__(result, field.name, part)  # also where the dataclass is frozen
        return result
    return visit(value, path)


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    result: Any = copy.copy(mapping)  # keeps the type and what else it carries
    try:
        for key, item in items.items():
            result[key] = item
    except TypeError:  # a read-only mapping
        return items
    return result


def _is_plain(value: Any) -> bool:
    """A value that a collate function leaves in a list with one entry a sample."""
    return isinstance(value, str | bytes | int | float | complex) or (
        value is not None
        and not isinstance(value, Tensor | np.ndarray | Mapping | list | tuple)
        and not dataclasses.is_dataclass(value)
    )
