"""Group rows of similar length, and measure how much of some batches is padding with and without groups."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import is_integer, list_leaves
from lightning_fasttrain.core.batch.padded_axes import (
    Extents,
    Proposal,
    count_tokens,
    likeliest_padding,
    propose_padding,
)
from lightning_fasttrain.core.messages import number_of

BATCHES = 4  # so many are looked at where a run or a loader has more
_PARTS, _MULTIPLE_OF = 8, 8
_LEAST = 0.05  # cutting off a smaller share is not worth a line
_IGNORED = -100


class PaddingShare:
    """The share of padding in the batches that were added, and the suggestion that follows from it.

    Whether padding has an effect on the training is not known here: only a trial on the model shows it.

    Attributes:
        batches: number of batches that were added.
        padded: number of their tokens, padding included.
        filled: number of their tokens without padding.
        left: number of tokens that micro-batches without padding would run.
        source: where the padding was read from.

    Example:
        >>> import torch
        >>> ids = torch.tensor([[5, 6] + [0] * 62, [7] * 64, *[[8] + [0] * 63] * 14])
        >>> print(measure_padding([{"input_ids": ids, "attention_mask": (ids != 0).long()}]))
        92% of the tokens of 1 batch seem to be padding (['attention_mask'] = 0): MicroBatching(8) would run ×0.18 of...
    """

    def __init__(self) -> None:
        self.batches = self.padded = self.filled = 0
        self.left = 0.0
        self.source = ""

    def add(self, batch: object) -> None:
        """Count the padding of a batch. The host waits for it if it is on a device."""
        self.batches += 1
        try:
            extents = _read(batch)
        except Exception:  # an unusual batch must not end a run for the sake of a suggestion
            return
        if extents is None:
            return
        groups = group_rows_evenly(extents, _PARTS, _MULTIPLE_OF)
        self.padded += extents.padded
        self.filled += extents.filled
        self.left += extents.padded * extents.share_of(groups, _MULTIPLE_OF)
        self.source = str(extents.padding)

    @property
    def share(self) -> float:
        """The share of padding among the tokens of the batches."""
        if not self.padded:
            return 0.0
        return 1 - self.filled / self.padded

    def __str__(self) -> str:
        """Suggest micro-batches without padding; return "" if they would run nearly as many tokens."""
        if self.padded == 0 or 1 - self.left / self.padded < _LEAST:
            return ""
        batches = number_of(self.batches, "batch", "batches")
        return (
            f"{self.share:.0%} of the tokens of {batches} seem to be padding ({self.source}): MicroBatching({_PARTS}) "
            f"would run ×{self.left / self.padded:.2f} of them, where a trial shows that padding has no effect."
        )


def measure_padding(batches: Iterable[object]) -> PaddingShare:
    """Return the share of padding in some batches.

    Example:
        >>> import torch
        >>> round(measure_padding([torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0], [9, 9, 0, 0]])]).share, 2)
        0.42
    """
    share = PaddingShare()
    for batch in batches:
        share.add(batch)
    return share


def _read(batch: object) -> Extents | None:
    """Return where the rows of a batch seem to begin and end; None if it does not seem to hold padded sequences."""
    leaves = list_leaves(batch)
    likely: list[list[Proposal]] = []
    for axis in propose_padding(batch):
        credible = [one for one in axis if _is_credible(one, leaves)]
        if credible:
            likely.append(credible)
    if not likely:
        return None
    return likeliest_padding(likely).read(batch)


def _is_credible(one: Proposal, leaves: Mapping[str, object]) -> bool:
    """Whether the axis looks like that of a sequence, since class labels and pictures may look like masks."""
    if one.axis.value == _IGNORED:  # labels alone may leave out prompts, which are no padding
        return False
    source = leaves[str(one.axis.source)]
    return source.ndim <= 2 and any(_is_sequence(leaves[path]) for path, _ in one.axis.members)


def _is_sequence(leaf: object) -> bool:
    """Whether a tensor looks like token ids (rows, length) or features (rows, length, features)."""
    if not isinstance(leaf, Tensor):
        return False
    if leaf.ndim == 2 and is_integer(leaf):
        return bool(((leaf != 0) & (leaf != 1)).any())
    return leaf.ndim == 3 and leaf.is_floating_point()


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
