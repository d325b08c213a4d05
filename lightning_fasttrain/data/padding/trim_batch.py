"""Cut a padded batch into micro-batches of rows of similar length, each as long as its own longest row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fasttrain.data.padding.padded_axes import Ends, Extents, count_tokens
from lightning_fasttrain.data.split_batch import list_tensors, walk_leaves


@dataclass(frozen=True)
class TrimmedParts:
    """Micro-batches of rows of similar length, without the padding that none of their rows needs.

    Attributes:
        parts: the micro-batches, the one with the longest rows first.
        rows: rows of the batch that each of them holds.
        spans: the part of each sequence axis that each of them holds.
        extents: where the rows of the batch begin and end.
    """

    parts: list[Any]
    rows: list[list[int]]
    spans: list[Ends]
    extents: Extents

    @property
    def order(self) -> list[int]:
        """The rows of the batch in the order of the micro-batches."""
        return [row for rows in self.rows for row in rows]

    @property
    def tokens(self) -> int:
        """The number of entries that the micro-batches have, in tokens."""
        return sum(map(self.tokens_of, range(len(self.parts))))

    def tokens_of(self, part: int) -> int:
        """Return the number of entries of one micro-batch, in tokens."""
        return len(self.rows[part]) * count_tokens(self.spans[part])

    def rows_of(self, part: int) -> list[int]:
        """Return the rows of the batch that a micro-batch holds."""
        return self.rows[part]

    def join(self, values: Sequence[Tensor], held: Sequence[int]) -> Tensor:
        """Join a tensor that each micro-batch returned, in the batch's own order of rows.

        Sequence axes get their full length back: what was cut off is zero.

        Args:
            values: a tensor of each micro-batch, with at least one axis.
            held: the micro-batches that they are from.
        """
        values = self._fill_up(values, held)
        if any(value.shape[1:] != values[0].shape[1:] for value in values):
            why = "they differ in an axis that is not one of the trimmed ones"
            raise ValueError(f"the tensors that micro-batches returned cannot be joined: {why}")
        joined = torch.cat(list(values))
        sizes = [len(self.rows[part]) for part in held]
        if len(held) < len(self.parts) or [len(value) for value in values] != sizes:
            return joined  # not one entry per row
        return joined[torch.tensor(self.order, device=joined.device).argsort()]

    def _fill_up(self, values: Sequence[Tensor], held: Sequence[int]) -> list[Tensor]:
        filled = list(values)
        for axis, size in enumerate(self.extents.sizes):
            spans = [self.spans[part][axis] for part in held]
            for place in range(1, min(value.ndim for value in values)):
                if all(value.shape[place] == stop - start for value, (start, stop) in zip(values, spans, strict=True)):
                    ends = zip(filled, spans, strict=True)
                    filled = [_fill(value, place, start, size) for value, (start, _) in ends]
                    break
        return filled


def _fill(value: Tensor, place: int, start: int, size: int) -> Tensor:
    shape = [*value.shape]
    shape[place] = size
    filled = value.new_zeros(shape)
    filled.narrow(place, start, value.shape[place]).copy_(value)
    return filled


def trim_batch(batch: Any, extents: Extents, rows: Sequence[Sequence[int]], multiple_of: int) -> TrimmedParts:
    """Return one micro-batch for each group of rows, cut to what these rows need.

    Example:
        >>> from lightning_fasttrain.data.padding.padded_axes import PaddedAxis, Padding
        >>> ids = torch.tensor([[1, 0, 0, 0], [2, 3, 4, 0], [5, 6, 0, 0]])
        >>> extents = Padding((PaddedAxis((("batch", (1,)),), "batch", 0),)).read(ids)
        >>> trim_batch(ids, extents, [[1], [2, 0]], multiple_of=1).parts
        [tensor([[2, 3, 4]]), tensor([[5, 6],
                [1, 0]])]
    """
    spans = [extents.spans_of(group, multiple_of) for group in rows]
    device = next((leaf.device for leaf in list_tensors(batch).values()), None)
    order = torch.tensor([row for group in rows for row in group], device=device)  # one copy to a device for all groups
    parts: list[Any] = []
    for group, places, span in zip(rows, order.split([len(group) for group in rows]), spans, strict=True):
        parts.append(_take(batch, extents, list(group), places, span))
    return TrimmedParts(parts, [list(group) for group in rows], spans, extents)


def _take(batch: Any, extents: Extents, rows: list[int], places: Tensor, spans: Ends) -> Any:
    cuts: dict[str, list[tuple[int, list[int]]]] = {}
    for axis, span in zip(extents.padding.axes, spans, strict=True):
        for path, along in axis.members:
            cuts.setdefault(path, []).extend((one, span) for one in along)

    def take(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            for axis, (start, stop) in cuts.get(path, ()):
                leaf = leaf.narrow(axis, start, stop - start)
            return leaf.index_select(0, places.to(leaf.device))
        if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
            for axis, (start, stop) in cuts.get(path, ()):
                leaf = leaf.take(range(start, stop), axis)
            return leaf[rows]
        if isinstance(leaf, list | tuple) and len(leaf) == len(extents.rows):
            return type(leaf)(leaf[row] for row in rows)
        return leaf

    return walk_leaves(batch, take, "batch")


def group_rows(extents: Extents, max_tokens: int, multiple_of: int, n: int | None = None) -> list[list[int]]:
    """Return groups of rows of similar length with at most so many tokens each, the longest rows first.

    The groups have the fewest tokens in total, the padding that remains included, where another group counts as a
    further half percent. A row that is longer than the budget has a group of its own.

    Args:
        extents: where the rows begin and end.
        max_tokens: the budget of each group.
        multiple_of: lengths are rounded up to a multiple of this.
        n: largest number of groups. The budget must allow it.

    Example:
        >>> from lightning_fasttrain.data.padding.padded_axes import PaddedAxis, Padding
        >>> padding = Padding((PaddedAxis((("batch", (1,)),), "batch", 0),))
        >>> group_rows(padding.read(torch.tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])), 4, 1)
        [[1], [3], [0, 2]]
    """
    order = sorted(range(len(extents.rows)), key=lambda row: -count_tokens(extents.rows[row]))
    costs = _count_tokens_of_ranges(extents, order, max_tokens, multiple_of)
    another = 0.005 * extents.filled
    groups = _divide(order, costs, another)
    while n is not None and len(groups) > n:
        another *= 2
        groups = _divide(order, costs, another)
    return groups


def group_rows_evenly(extents: Extents, n: int, multiple_of: int) -> list[list[int]]:
    """Return at most ``n`` groups of rows of similar length, none larger than if rows were split with their padding."""
    return group_rows(extents, -(-len(extents.rows) // n) * sum(extents.sizes), multiple_of, n)


def _count_tokens_of_ranges(
    extents: Extents, order: Sequence[int], max_tokens: int, multiple_of: int
) -> list[np.ndarray]:
    """Return, for each row in order, the tokens of the groups that begin with it; infinite above the budget."""
    sizes = np.array(extents.sizes)
    ends = np.array([extents.rows[row] for row in order])
    starts = np.where(ends[..., 1] > 0, ends[..., 0], sizes)  # an empty row begins nowhere
    costs: list[np.ndarray] = []
    for first in range(len(order)):
        begins = np.minimum.accumulate(starts[first:])
        lengths = np.maximum.accumulate(ends[first:, :, 1]) - begins
        rounded = np.minimum(np.maximum(1, -(-lengths // multiple_of)) * multiple_of, sizes).sum(1)
        tokens = (rounded * np.arange(1, len(rounded) + 1)).astype(float)
        tokens[1:][tokens[1:] > max_tokens] = np.inf
        costs.append(tokens)
    return costs


def _divide(order: Sequence[int], costs: Sequence[np.ndarray], another: float) -> list[list[int]]:
    """Return the cheapest way to divide rows into groups, each of which also costs ``another``."""
    cheapest = np.zeros(len(order) + 1)  # of the rows from here on
    following = np.zeros(len(order), dtype=int)
    for first in reversed(range(len(order))):
        totals = costs[first] + another + cheapest[first + 1 :]
        best = int(totals.argmin())
        cheapest[first], following[first] = totals[best], first + best + 1
    groups: list[list[int]] = []
    first = 0
    while first < len(order):
        groups.append(list(order[first : following[first]]))
        first = int(following[first])
    return groups


def split_groups(groups: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """Return ``n`` groups, by halving those with the most rows; fewer if there are not enough rows.

    Example:
        >>> split_groups([[0], [1, 2, 3], [4, 5]], 5)
        [[0], [1], [2], [3], [4, 5]]
    """
    split = [list(group) for group in groups]
    while len(split) < n:
        largest = max(range(len(split)), key=lambda place: len(split[place]))
        rows = split[largest]
        if len(rows) == 1:
            break
        half = -(-len(rows) // 2)
        split[largest : largest + 1] = [rows[:half], rows[half:]]
    return split
