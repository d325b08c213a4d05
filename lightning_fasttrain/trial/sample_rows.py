"""Choose a few differing rows of a batch, and split them, to try how a loss can be split."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.core.batch.leaves import batch_size, list_leaves, pick_rows, take_rows, walk_leaves
from lightning_fasttrain.core.state.values import to_float64
from lightning_fasttrain.trial.deterministic_step import Rows

_ROWS = 6
# Values that labels and masks use for entries that are not counted.
_NOT_COUNTED = (-100, 0, -1, 255)


@dataclass
class Sample:
    """A few samples, and the ways in which they are split: micro-batches, each with its rows if they are known."""

    whole: Any
    size: int
    cuttings: list[list[tuple[Any, Rows | None]]]


def sample_rows(batch: object, micro_batch_size: int) -> Iterator[Sample]:
    """Yield samples of a batch, the largest first, for a step that may not fit in memory, or of rows without targets.

    The rows are those with the most and with the fewest counted entries in some tensor, so that a rule cannot match by
    chance. The first row is in the sample twice, once in each micro-batch of the first split: a count adds up over
    rows, but the number of distinct labels, for example, does not.

    Args:
        batch: any batch that :func:`~lightning_fasttrain.micro_batching.split_batch` takes.
        micro_batch_size: number of samples that is known to fit in memory.

    Example:
        >>> sample = next(sample_rows((torch.zeros(4, 2), torch.tensor([5, 7, 9, 0])), 4))
        >>> sample.size, [[len(micro_batch[1]) for micro_batch, _ in cutting] for cutting in sample.cuttings]
        (4, [[1, 3], [3, 1]])
    """
    size = batch_size(batch)
    rows = rank_rows(batch, size)
    most = min(size, _ROWS, micro_batch_size - 1)
    # Two rows are the minimum that can be split.
    others = dict.fromkeys(rows[min(place, size - 1)] for place in (1, 2, 3))
    picks = [*([rows[0], other] for other in others), [0, size - 1]]
    if most > 1:
        picks.insert(0, [rows[0], *rows[:most]])
    for pick in dict.fromkeys(map(tuple, picks)):
        whole, number = pick_rows(batch, list(pick)), len(pick)
        slices = [[slice(0, cut), slice(cut, number)] for cut in sorted({1, number - 1})]
        yield _cut(whole, number, slices)


def sample_groups(batch: object, groups: Iterable[tuple[list[int], list[int]]]) -> Iterator[Sample]:
    """Yield the rows of two groups together, split into the groups.

    Example:
        >>> [sample.whole for sample in sample_groups(torch.tensor([1, 2, 3]), [([2], [0, 1]), ([1], [0])])]
        [tensor([3, 1, 2]), tensor([2, 1])]
    """
    for one, other in groups:
        size = len(one) + len(other)
        yield _cut(pick_rows(batch, [*one, *other]), size, [[slice(0, len(one)), slice(len(one), size)]])


def list_altered(sample: Sample, ignored: int | None = None) -> Iterator[Sample]:
    """Yield the sample with a repeated row, if it has none yet, with other weights and masks, and with other labels.

    A loss that is a sum over samples is one for any samples, weights and masks, so a rule must hold for these, too.
    Masks lose some entries, and other values are multiplied by a different factor in each row. Some labels of each row
    become ``ignored``, which distinguishes a mean over targets from one over samples. Each is split in one way. Yields
    nothing where the micro-batches are not rows, or nothing can be altered.

    Args:
        sample: a sample whose micro-batches are rows.
        ignored: a label that the loss ignores; None leaves the labels unchanged.

    Example:
        >>> sample = next(sample_rows((torch.ones(4, 3),), 4))
        >>> [one.whole[0].sum(1) for one in list_altered(sample)]
        [tensor([2., 2., 3., 2.])]
    """
    if any(rows is None for cutting in sample.cuttings for _, rows in cutting):
        return
    if sample.size == 2:
        yield _cut_as(sample, pick_rows(sample.whole, [0, 0]))
    altered = walk_leaves(sample.whole, _alter, "batch")
    before, after = list_leaves(sample.whole), list_leaves(altered)
    if any(after[path] is not leaf for path, leaf in before.items()):
        yield _cut_as(sample, altered)
    labels = find_labels(sample.whole)[1]
    if ignored is not None and labels is not None and _may_hold(labels, ignored):
        fewer = labels.masked_fill(~_pattern(labels), ignored)
        yield _cut_as(sample, walk_leaves(sample.whole, lambda leaf, _: fewer if leaf is labels else leaf, "batch"))


def _may_hold(labels: Tensor, value: int) -> bool:
    """Whether a step can handle this value among labels."""
    if not torch.iinfo(labels.dtype).min <= value <= torch.iinfo(labels.dtype).max:
        return False
    # On a GPU, an index outside a lookup table ends the process.
    return labels.device.type == "cpu" or bool((labels == value).any())


def _alter(leaf: object, path: str) -> Any:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.is_complex():
        return leaf
    if bool(((leaf == 0) | (leaf == 1)).all()):
        return leaf * _pattern(leaf)
    if leaf.is_floating_point():
        factors = torch.linspace(0.5, 1, leaf.shape[0], dtype=leaf.dtype, device=leaf.device)
        return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))
    return leaf


def _cut_as(sample: Sample, whole: object) -> Sample:
    slices = [rows for _, rows in sample.cuttings[0] if rows is not None]
    return _cut(whole, sample.size, [slices])


def _cut(whole: object, size: int, slices: Sequence[Sequence[Rows]]) -> Sample:
    cuttings: list[list[tuple[Any, Rows | None]]] = []
    for cutting in slices:
        cuttings.append([(take_rows(whole, rows.start, rows.stop), rows) for rows in cutting])
    return Sample(whole, size, cuttings)


def _pattern(leaf: Tensor) -> Tensor:
    """Return a mask of the entries that stay, of which each row has a different number."""
    rows, inside = leaf.shape[0], leaf[0].numel()
    period = torch.arange(rows, device=leaf.device)[:, None] % 3 + 2
    if inside == 1:
        return (period != 3).reshape(leaf.shape)
    places = torch.arange(1, inside + 1, device=leaf.device)[None, :]
    return (places % period != 0).reshape(leaf.shape)


def first_micro_batch(batch: object, n: int, split: Callable[[Any, int], list[Any]]) -> Iterator[Sample]:
    """Yield the first micro-batch of a batch that the user's function splits, split by the same function.

    Where it cannot be split again, as with one sample, that of a coarser split is taken, so that there is something to
    compare.
    """
    sample = _split_again(split(batch, n)[0], split)
    while not sample.cuttings and n > 1:
        n //= 2
        with suppress(Exception):  # the function may know a single number of micro-batches
            coarser = _split_again(split(batch, n)[0], split)
            sample = coarser if coarser.cuttings else sample
    yield sample


def _split_again(whole: object, split: Callable[[Any, int], list[Any]]) -> Sample:
    cuttings: list[list[tuple[Any, Rows | None]]] = []
    for micro_batches in (2, 3):
        # The function may refuse more micro-batches than there are samples, of which it alone knows the number.
        with suppress(Exception):
            cuttings.append([(micro_batch, None) for micro_batch in split(whole, micro_batches)])
    return Sample(whole, 1, [cutting for cutting in cuttings if len(cutting) > 1])


def rank_rows(batch: object, size: int) -> list[int]:
    """Return the rows, starting with those that have the most or the fewest counted entries in some tensor."""
    order: dict[int, None] = {}
    for leaf in list_leaves(batch).values():
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.ndim > 0 and not leaf.is_complex():
            for feature in _count_features(leaf):
                order.setdefault(int(feature.argmax()))
                order.setdefault(int(feature.argmin()))
    return list(dict.fromkeys([*order, 0, size - 1, *range(size)]))


def _count_features(leaf: Tensor) -> Iterator[Tensor]:
    """Yield, for each row, its count in different interpretations of the tensor."""
    rows = leaf.detach().reshape(leaf.shape[0], -1)
    if leaf.is_floating_point():
        yield rows.isnan().sum(1)
        if not bool((rows == 0).any()):
            return  # model inputs rather than masks or weights
        yield (rows == 0).sum(1)
        return
    for value in _NOT_COUNTED:
        if leaf.dtype is not torch.bool or value == 0:
            counted = (rows != value).sum(1)
            if bool((counted != counted[0]).any()):
                yield counted
    yield to_float64(rows).mean(1)
