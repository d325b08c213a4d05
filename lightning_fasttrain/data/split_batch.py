"""Split a batch of any structure into micro-batches."""

import itertools
from typing import Any

import numpy as np
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import batch_size, walk_leaves
from lightning_fasttrain.core.checks import PositiveInt, check_arguments


@check_arguments
def split_batch(batch: object, n: PositiveInt) -> list[Any]:
    """Split ``batch`` into ``n`` micro-batches of neighbouring samples, whose sizes differ by one at most.

    The rule: the first axis of every tensor (or NumPy array) with an axis is the batch axis, and all of them have the
    same length B. A list or tuple of B plain values such as strings is split likewise. Everything else, such as
    0-dimensional tensors, strings, None and your own objects, is repeated in every micro-batch. Tuples, lists, mappings
    (``BatchEncoding`` too), dataclasses and named tuples are traversed and keep their type; tensors are split without
    copying.

    Args:
        batch: tensors of shape (B, ...), in any nesting.
        n: number of micro-batches, at least 1. A batch of fewer than n samples gives one micro-batch per sample.

    Returns:
        ``min(n, B)`` batches of the same structure.

    Raises:
        ValueError: nothing to split, no samples, or a leaf of another length; the message names the leaf.

    Example:
        >>> import torch
        >>> parts = split_batch({"x": torch.arange(5), "name": "train"}, 2)
        >>> [(part["x"].tolist(), part["name"]) for part in parts]
        [([0, 1, 2], 'train'), ([3, 4], 'train')]
    """
    size = batch_size(batch)
    stops = list(itertools.accumulate(split_sizes(size, n)))
    return [_select(batch, slice(start, stop), size) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def split_sizes(size: int, n: PositiveInt) -> list[int]:
    """Return the sizes of ``n`` micro-batches, which differ by one at most; one per sample where there are fewer.

    Example:
        >>> split_sizes(5, 2), split_sizes(2, 4)
        ([3, 2], [1, 1])
    """
    n = min(n, size)
    share, rest = divmod(size, n)
    return [share + 1] * rest + [share] * (n - rest)


def take_rows(batch: object, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of ``batch``, by the rule of :func:`split_batch`.

    Example:
        >>> import torch
        >>> take_rows((torch.arange(5), "train"), 1, 3)
        (tensor([1, 2]), 'train')
    """
    return _select(batch, slice(start, stop), batch_size(batch))


def pick_rows(batch: object, rows: list[int]) -> Any:
    """Return the samples with these indices, in their order, by the rule of :func:`split_batch`; indices may repeat.

    Example:
        >>> import torch
        >>> pick_rows((torch.arange(5), ["a", "b", "c", "d", "e"]), [4, 0, 4])
        (tensor([4, 0, 4]), ['e', 'a', 'e'])
    """
    return _select(batch, rows, batch_size(batch))


def reverse_rows(batch: object) -> Any:
    """Return the samples of ``batch`` in reverse order, by the rule of :func:`split_batch`.

    Example:
        >>> import torch
        >>> reverse_rows((torch.arange(3), ["a", "b", "c"]))
        (tensor([2, 1, 0]), ['c', 'b', 'a'])
    """
    # By indices, since torch does not accept arrays with negative strides.
    return pick_rows(batch, list(reversed(range(batch_size(batch)))))


def _select(batch: object, rows: slice | list[int], size: int) -> Any:
    def select(leaf: object, path: str) -> Any:
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            return leaf[rows]
        if isinstance(leaf, list | tuple) and len(leaf) == size:
            if isinstance(rows, slice):
                return leaf[rows]
            return type(leaf)(map(leaf.__getitem__, rows))
        return leaf

    return walk_leaves(batch, select, "batch")
