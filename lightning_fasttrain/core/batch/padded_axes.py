"""Read how much of each row of a batch is padding, along the axes that hold sequences."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import list_leaves

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

        The host waits for the batch, once, if it is on a device.
        """
        leaves = list_leaves(batch)
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
