"""Find the axes of a batch that may be padded, and the tensors that may show it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import batch_size, list_leaves
from lightning_fasttrain.core.batch.padded_axes import (
    Leaves,
    Lengths,
    PaddedAxis,
    Padding,
    find_extents,
)
from lightning_fasttrain.core.messages import explain

_IGNORED = -100
# Kinds of evidence, the most reliable first.
_MASK, _LENGTHS, _IDS, _LABELS, _ZEROS = range(5)


@dataclass
class Proposal:
    """A padded axis that a tensor may show.

    Attributes:
        axis: the axis.
        kind: the kind of evidence, the most reliable first.
        ends: where each row begins and ends: shape (rows, 2).
        share: share of the entries that is padding, if the proposal is right.
        support: number of other tensors in which the same entries have a constant value.
    """

    axis: PaddedAxis
    kind: int
    ends: Tensor = field(repr=False)
    share: float
    support: int = 0

    @property
    def rank(self) -> tuple[int, int, float, float]:
        """Sorts proposals, the likeliest first; padding on the right is the more frequent."""
        starts_late = float(self.ends[:, 0].double().mean())
        return self.kind, -self.support, starts_late, -self.share


def propose_padding(
    batch: object, lengths: str | Lengths | None = None, *, zeros: bool = False
) -> list[list[Proposal]]:
    """Return, for each length of a sequence axis in a batch, what may show its padding, the likeliest first.

    Masks are tensors of zeros and ones whose rows each have one block of entries to keep, of either value; lengths are
    integers, one per row, that do not exceed the axis; ids are integers with the same value at an end of several rows;
    labels end or begin with -100. What is right can only be told by running the model.

    Args:
        batch: any batch that :func:`~lightning_fasttrain.data.split_batch` takes.
        lengths: the tensor that shows the padding, by the end of its path in the batch, or a function that maps a batch
            to the lengths of its rows. By default all tensors are considered.
        zeros: whether floating-point tensors that begin or end with zeros are considered, too, as for audio.

    Raises:
        ValueError: ``lengths`` names no tensor of the batch.

    Example:
        >>> ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
        >>> [[str(one.axis) for one in axis] for axis in propose_padding({"ids": ids, "mask": ids != 0})]
        [["['mask'] = 0", "['mask'] = 1 on the left", "['ids'] = 0"]]
    """
    leaves, rows = list_leaves(batch), batch_size(batch)
    if isinstance(lengths, str):
        _refuse_unknown(lengths, leaves)
    axes = _list_axes(leaves)
    found: list[list[Proposal]] = []
    for size, members in axes.items():
        proposals: list[Proposal] = []
        for axis, kind, ends in _look_at_axis(batch, leaves, size, members, lengths):
            for one, cut in _choose_sides(axis, ends, size):
                share = 1 - float((cut[:, 1] - cut[:, 0]).sum()) / (rows * size)
                if 0 < share < 1:
                    proposals.append(Proposal(one, kind, cut, share))
        _count_support(proposals)
        kept = [one for one in proposals if zeros or lengths is not None or one.kind != _ZEROS]
        if kept:
            found.append(sorted(kept, key=lambda one: one.rank))
    return found


def _refuse_unknown(name: str, leaves: Leaves) -> None:
    if not any(_is_named(path, name) for path in leaves):
        names = ", ".join(path.removeprefix("batch") for path in leaves)
        way_out = f"Name one of {names}, or give a function of a batch"
        raise ValueError(explain(f"lengths={name!r}", "the batch has no tensor of this name", way_out))


def _is_named(path: str, name: str) -> bool:
    return path.endswith((f"[{name!r}]", f".{name}")) or path.removeprefix("batch") == name


def _list_axes(leaves: Leaves) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the tensors that share an axis of some length, each with the places of that axis."""
    axes: dict[int, dict[str, tuple[int, ...]]] = {}
    for path, leaf in leaves.items():
        shape = getattr(leaf, "shape", ())
        for size in dict.fromkeys(shape[1:]):
            places = [place for place in range(1, len(shape)) if shape[place] == size]
            # A (B, T, T) mask has two such axes; features of (B, T, F) with F = T have one.
            if len(places) > 1 and not (isinstance(leaf, Tensor) and _is_binary(leaf)):
                places = places[:1]
            if size > 1:
                axes.setdefault(size, {})[path] = tuple(places)
    return axes


def _look_at_axis(
    batch: object, leaves: Leaves, size: int, members: dict[str, tuple[int, ...]], lengths: str | Lengths | None
) -> Iterator[tuple[PaddedAxis, int, Tensor]]:
    """Yield what may show the padding of an axis: the axis, the kind of evidence, and where rows begin and end."""
    shared = tuple(members.items())
    if lengths is not None and not isinstance(lengths, str):
        axis = PaddedAxis(shared, lengths, None)
        yield axis, _MASK, axis.read(batch, leaves, size)
        return
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor) or (isinstance(lengths, str) and not _is_named(path, lengths)):
            continue
        if path in members:
            for kind, value in _list_values(leaf, members[path][-1]):
                yield PaddedAxis(shared, path, value), kind, find_extents(leaf, members[path][-1], value)
        elif _may_be_lengths(leaf, size):
            axis = PaddedAxis(shared, path, None)
            yield axis, _LENGTHS, axis.read(batch, leaves, size)


def _choose_sides(axis: PaddedAxis, ends: Tensor, size: int) -> Iterator[tuple[PaddedAxis, Tensor]]:
    """Yield the axis with the sides on which rows are padded; if they are on both, also with each of them alone."""
    filled = ends[ends[:, 1] > 0]
    left, right = bool((filled[:, 0] > 0).any()), bool((filled[:, 1] < size).any())
    yield replace(axis, left=left, right=right), ends
    if left and right:
        starts, stops = ends.unbind(1)
        yield replace(axis, left=False), torch.stack([torch.zeros_like(starts), stops], 1)
        yield replace(axis, right=False), torch.stack([starts, torch.full_like(stops, size)], 1)


def _may_be_lengths(leaf: Tensor, size: int) -> bool:
    if leaf.ndim != 1 or leaf.dtype not in (torch.int32, torch.int64):
        return False
    # Of a batch that is padded to its longest row, one row has the full length.
    return int(leaf.min()) > 0 and int(leaf.max()) == size


def _list_values(leaf: Tensor, axis: int) -> Iterator[tuple[int, float]]:
    """Yield the values that padded entries of a tensor may have along an axis, with the kind of evidence."""
    if _is_binary(leaf):
        for value in (0.0, 1.0):
            if _is_block(leaf, axis, value):
                yield _MASK, value
    elif leaf.is_floating_point():
        yield _ZEROS, 0.0
    elif leaf.ndim == 2 and not leaf.is_complex():
        first, last = float(leaf[:, 0].mode().values), float(leaf[:, -1].mode().values)
        for value in dict.fromkeys((last, first)):
            if value == _IGNORED:
                yield _LABELS, value
            elif _is_no_chance(find_extents(leaf, axis, value), leaf.shape[1]):
                yield _IDS, value


def _is_no_chance(ends: Tensor, size: int) -> bool:
    """Whether several rows have two padded entries or more: one may be a token that happens to have this value."""
    widths = ends[:, 1] - ends[:, 0]
    rows = int(((size - widths >= 2) & (widths > 0)).sum())
    return rows >= max(1, min(2, len(ends) - 1))


def _is_binary(leaf: Tensor) -> bool:
    return leaf.dtype is torch.bool or (not leaf.is_complex() and bool(((leaf == 0) | (leaf == 1)).all()))


def _is_block(mask: Tensor, axis: int, value: float) -> bool:
    """Whether the entries of each row that do not have a value are neighbours."""
    if mask.ndim > 2:
        return True  # such as a causal mask of (B, 1, T, T)
    ends = find_extents(mask, axis, value)
    return bool(((mask != value).sum(1) == ends[:, 1] - ends[:, 0]).all())


def _count_support(proposals: list[Proposal]) -> None:
    for one in proposals:
        agreeing = {other.axis.source for other in proposals if torch.equal(one.ends, other.ends)}
        one.support = len(agreeing - {one.axis.source})


def likeliest_padding(proposals: list[list[Proposal]]) -> Padding:
    """Return the padding if the likeliest proposal is right for each axis."""
    return Padding(tuple(axis[0].axis for axis in proposals))
