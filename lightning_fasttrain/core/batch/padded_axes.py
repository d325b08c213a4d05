"""Find the padding of a batch: the axes that hold sequences, and how much of each row is filled."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fasttrain.core.batch.host_copies import on_host_if_known
from lightning_fasttrain.core.batch.leaves import batch_size, list_leaves
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.values import to_float64

Leaves = dict[str, Any]
Lengths = Callable[[Any], Tensor]


@dataclass(frozen=True)
class PaddedAxis:
    """A sequence axis that several tensors of a batch share, and the tensor in which its padding is read.

    Attributes:
        members: path of each tensor with this axis, and the places of the axis in its shape.
        source: path of the tensor that shows the padding, or a function that maps a batch to the lengths of its rows.
        value: value of that tensor's padded entries; None where it holds the lengths of the rows.
        left: whether rows are cut at their beginning.
        right: whether rows are cut at their end.
    """

    members: tuple[tuple[str, tuple[int, ...]], ...]
    source: str | Lengths
    value: float | None
    left: bool = True
    right: bool = True

    def __str__(self) -> str:
        if not isinstance(self.source, str):
            return "lengths="
        name = self.source.removeprefix("batch")
        if self.value is None:
            return name
        side = {(True, True): " on both sides", (True, False): " on the left"}.get((self.left, self.right), "")
        return f"{name} = {self.value:g}{side}"

    def size_in(self, leaves: Leaves) -> int | None:
        """Return the length of the axis; None where the batch does not have it, or in another place."""
        sizes: set[int] = set()
        for path, axes in self.members:
            shape = getattr(leaves.get(path), "shape", ())
            if len(shape) <= max(axes):
                return None
            sizes.update(shape[axis] for axis in axes)
        is_there = not isinstance(self.source, str) or isinstance(leaves.get(self.source), Tensor)
        if not is_there or len(sizes) != 1:
            return None
        return sizes.pop()

    def read(self, batch: object, leaves: Leaves, size: int) -> Tensor:
        """Return the first entry of each row, and the one after its last, along the axis: shape (rows, 2)."""
        if not isinstance(self.source, str):
            return _from_lengths(torch.as_tensor(self.source(batch)), size)
        if self.value is None:
            return _from_lengths(leaves[self.source], size)
        axes = dict(self.members)[self.source]
        ends = find_extents(leaves[self.source], axes[-1], self.value)
        starts, stops = ends.unbind(1)
        if not self.left:
            starts = torch.zeros_like(starts)
        if not self.right:
            stops = torch.full_like(stops, size)
        return torch.stack([starts, stops], 1)


def _from_lengths(lengths: Tensor, size: int) -> Tensor:
    stops = lengths.detach().long().clamp(0, size)
    return torch.stack([torch.zeros_like(stops), stops], 1)


def find_extents(leaf: Tensor, axis: int, value: float) -> Tensor:
    """Return where each row begins and ends along an axis, if padded entries have a given value: shape (rows, 2).

    Padding is cut at the ends alone: entries with this value inside a row stay. A row without other values is empty.

    Example:
        >>> find_extents(torch.tensor([[0, 5, 0, 6, 0], [0, 0, 0, 0, 0]]), 1, 0).tolist()
        [[1, 4], [0, 0]]
    """
    filled = leaf.detach() != value
    if filled.ndim > 2:
        filled = filled.movedim(axis, 1).flatten(2).any(2)
    marks = filled.to(torch.uint8)
    starts, stops = marks.argmax(1), marks.shape[1] - marks.flip(1).argmax(1)
    return torch.stack([starts, stops], 1) * filled.any(1)[:, None]


@dataclass(frozen=True)
class Padding:
    """The padded axes of a run's batches.

    Attributes:
        axes: one for each kind of sequence, such as those of an encoder and of a decoder.
    """

    axes: tuple[PaddedAxis, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.axes))

    def read(self, batch: object) -> "Extents | None":
        """Return where the rows of a batch begin and end; None where it does not have these axes.

        The host waits for the batch, once, if it is on a device and its values are not known on the host.
        """
        leaves = list_leaves(batch)
        for path, leaf in leaves.items():
            if isinstance(leaf, Tensor) and not leaf.is_cpu:
                leaves[path] = on_host_if_known(leaf)
        sizes: list[int] = []
        for axis in self.axes:
            size = axis.size_in(leaves)
            if size is None:
                return None
            sizes.append(size)
        read = [axis.read(batch, leaves, size) for axis, size in zip(self.axes, sizes, strict=True)]
        return Extents(self, sizes, torch.stack(read, 1).tolist(), self._leaves_more(leaves, sum(sizes)))

    def _leaves_more(self, leaves: Leaves, length: int) -> bool:
        """Whether rows of some length also hold pictures or sequences that keep their length."""
        cut: set[str] = set()
        for axis in self.axes:
            cut.update(dict(axis.members))
        for path, leaf in leaves.items():
            if path in cut or not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim < 2:
                continue
            is_float = leaf.is_floating_point() if isinstance(leaf, Tensor) else leaf.dtype.kind == "f"
            # A few numbers for each row, such as metadata, take little memory; integers may be token ids.
            few = length if is_float else 1
            if leaf.ndim > 2 or leaf.shape[1] > few:
                return True
        return False

    def as_state(self) -> list[dict[str, Any]]:
        """Return the axes as plain values for a checkpoint; a function of the user's is not part of them."""
        return [dict(vars(axis)) for axis in self.axes if isinstance(axis.source, str)]


def padding_in(state: Sequence[dict[str, Any]]) -> Padding | None:
    """Return the padding that a checkpoint holds."""
    axes: list[PaddedAxis] = []
    for axis in state:
        members = tuple((path, tuple(places)) for path, places in axis["members"])
        axes.append(PaddedAxis(members, axis["source"], axis["value"], axis["left"], axis["right"]))
    if not axes:
        return None
    return Padding(tuple(axes))


@dataclass(frozen=True)
class Extents:
    """Places at which the rows of one batch begin and end.

    Attributes:
        padding: the axes.
        sizes: length of each axis.
        rows: for each row, the first entry and the one after the last along each axis.
        has_more: whether rows also hold pictures or sequences that keep their length.
    """

    padding: Padding
    sizes: list[int]
    rows: list["Ends"]
    has_more: bool = False

    @property
    def padded(self) -> int:
        """The number of entries with padding, in tokens."""
        return len(self.rows) * sum(self.sizes)

    @property
    def filled(self) -> int:
        """The number of entries without padding, in tokens."""
        return sum(map(count_tokens, self.rows))

    @property
    def share(self) -> float:
        """The share of padding."""
        return 1 - self.filled / self.padded

    def ends_of(self, rows: Iterable[int]) -> "Ends":
        """Return where the earliest of some rows begins and the latest ends, along each axis."""
        return merge_ends([self.rows[row] for row in rows])

    def spans_of(self, rows: Iterable[int], multiple_of: int) -> "Ends":
        """Return the part of each axis that some rows need, its length rounded up to a multiple.

        Example:
            >>> axis = PaddedAxis((("batch", (1,)),), "batch", 0)
            >>> extents = Padding((axis,)).read(torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]))
            >>> extents.spans_of([0, 1], 1), extents.spans_of([1], 4)
            ([[0, 3]], [[0, 4]])
        """
        return self.round(self.ends_of(rows), multiple_of)

    def share_of(self, groups: Sequence[Sequence[int]], multiple_of: int) -> float:
        """Return the share of the entries that groups of rows have, each cut to what its rows need."""
        tokens = [len(rows) * count_tokens(self.spans_of(rows, multiple_of)) for rows in groups]
        return sum(tokens) / self.padded

    def is_whole(self, rows: Iterable[int], multiple_of: int) -> bool:
        """Whether nothing of these rows is cut off."""
        return count_tokens(self.spans_of(rows, multiple_of)) == sum(self.sizes)

    def may_be_cut(self, multiple_of: int) -> bool:
        """Whether some row is short enough for padding to be cut off."""
        return any(not self.is_whole([row], multiple_of) for row in range(len(self.rows)))

    def round(self, ends: "Ends", multiple_of: int) -> "Ends":
        spans: Ends = []
        for (start, stop), size in zip(ends, self.sizes, strict=True):
            # An empty row needs no entry, but most models cannot run on an axis of length 0.
            length = min(size, max(1, -(-(stop - start) // multiple_of)) * multiple_of)
            # Rows that end with the axis are padded on the left.
            begin = size - length
            if stop != size:
                begin = min(start, begin)
            spans.append([begin, begin + length])
        return spans


Ends = list[list[int]]  # the first entry, and the one after the last, along each axis


def merge_ends(all_ends: Sequence[Ends]) -> Ends:
    """Return where the earliest begins and the latest ends, along each axis; empty rows are left out.

    Example:
        >>> merge_ends([[[2, 5]], [[0, 3]], [[0, 0]]])
        [[0, 5]]
    """
    merged: Ends = []
    for along in zip(*all_ends, strict=True):
        filled = [ends for ends in along if ends[1] > 0] or [[0, 0]]
        starts, stops = zip(*filled, strict=True)
        merged.append([min(starts), max(stops)])
    return merged


def count_tokens(spans: Ends) -> int:
    """Return the total length over all axes."""
    return sum(stop - start for start, stop in spans)


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
        starts_late = float(to_float64(self.ends[:, 0]).mean())
        return self.kind, -self.support, starts_late, -self.share


def propose_padding(
    batch: object, lengths: str | Lengths | None = None, *, zeros: bool = False
) -> list[list[Proposal]]:
    """Return, for each length of a sequence axis in a batch, what may show its padding, the likeliest first.

    Masks are tensors of zeros and ones whose rows each have one block of entries to keep, of either value; lengths are
    integers, one per row, that do not exceed the axis; ids are integers with the same value at an end of several rows;
    labels end or begin with -100. What is right can only be told by running the model.

    Args:
        batch: any batch that :func:`~lightning_fasttrain.micro_batching.split_batch` takes.
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
