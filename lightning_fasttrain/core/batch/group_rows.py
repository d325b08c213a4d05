"""Group the rows of a padded batch by length, so that little padding remains in each group."""

from collections.abc import Sequence

import numpy as np

from lightning_fasttrain.core.batch.padded_axes import Extents, count_tokens


def group_rows(
    extents: Extents, max_tokens: int, multiple_of: int, n: int | None = None, most_rows: int | None = None
) -> list[list[int]]:
    """Return groups of rows of similar length with at most so many tokens each, the longest rows first.

    The groups have the fewest tokens in total, the padding that remains included, where another group counts as a
    further half percent. A row that is longer than the budget has a group of its own.

    Args:
        extents: where the rows begin and end.
        max_tokens: the budget of each group.
        multiple_of: lengths are rounded up to a multiple of this.
        n: largest number of groups. The budget must allow it.
        most_rows: largest number of rows in a group.

    Example:
        >>> import torch
        >>> from lightning_fasttrain.core.batch.padded_axes import PaddedAxis, Padding
        >>> padding = Padding((PaddedAxis((("batch", (1,)),), "batch", 0),))
        >>> group_rows(padding.read(torch.tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])), 4, 1)
        [[1], [3], [0, 2]]
    """
    order = sorted(range(len(extents.rows)), key=lambda row: -count_tokens(extents.rows[row]))
    costs = _count_tokens_of_ranges(extents, order, max_tokens, multiple_of)
    for tokens in costs:
        tokens[most_rows or len(order) :] = np.inf
    another = 0.005 * extents.filled
    groups = _divide(order, costs, another)
    while n is not None and len(groups) > n:
        another *= 2
        groups = _divide(order, costs, another)
    return groups


def group_rows_evenly(extents: Extents, n: int, multiple_of: int) -> list[list[int]]:
    """Return at most ``n`` groups of rows of similar length, none larger than if rows were split with their padding.

    Where rows also hold pictures or sequences that keep their length, no group has more rows than with padding either.
    """
    each = -(-len(extents.rows) // n)
    most_rows = None
    if extents.has_more:
        most_rows = each
    return group_rows(extents, each * sum(extents.sizes), multiple_of, n, most_rows)


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
    split = list(map(list, groups))
    while len(split) < n:
        largest = max(range(len(split)), key=lambda place: len(split[place]))
        rows = split[largest]
        if len(rows) == 1:
            break
        half = -(-len(rows) // 2)
        split[largest : largest + 1] = [rows[:half], rows[half:]]
    return split
