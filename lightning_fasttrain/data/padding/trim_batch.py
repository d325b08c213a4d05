"""Cut a padded batch into micro-batches of rows of similar length, each as long as its own longest row."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fasttrain.core.batch.leaves import list_tensors, walk_leaves
from lightning_fasttrain.core.batch.padded_axes import Ends, Extents, count_tokens


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
        return list(itertools.chain.from_iterable(self.rows))

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
        sizes = list(map(len, map(self.rows_of, held)))
        if len(held) < len(self.parts) or list(map(len, values)) != sizes:
            return joined  # not one entry per row
        return joined[torch.tensor(self.order, device=joined.device).argsort()]

    def _fill_up(self, values: Sequence[Tensor], held: Sequence[int]) -> list[Tensor]:
        filled = list(values)
        for axis, size in enumerate(self.extents.sizes):
            spans = [self.spans[part][axis] for part in held]
            for place in range(1, min(map(Tensor.dim, values))):
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


@contextmanager
def attention_for_any_length() -> Iterator[None]:
    """Leave cuDNN out of torch's choice for attention, as it builds a plan for each new shape.

    That takes 150 ms on an H200, where a forward and backward of a known shape take 0.6 ms, and cut micro-batches have
    many lengths. Flash and efficient attention need no plan. A user's own choice of cuDNN alone stays.
    """
    kernels = torch.backends.cuda
    others = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled()
    if not (others and kernels.cudnn_sdp_enabled()):
        yield
        return
    kernels.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        kernels.enable_cudnn_sdp(True)


def trim_batch(batch: object, extents: Extents, rows: Sequence[Sequence[int]], multiple_of: int) -> TrimmedParts:
    """Return one micro-batch for each group of rows, cut to what these rows need.

    Example:
        >>> from lightning_fasttrain.core.batch.padded_axes import PaddedAxis, Padding
        >>> ids = torch.tensor([[1, 0, 0, 0], [2, 3, 4, 0], [5, 6, 0, 0]])
        >>> extents = Padding((PaddedAxis((("batch", (1,)),), "batch", 0),)).read(ids)
        >>> trim_batch(ids, extents, [[1], [2, 0]], multiple_of=1).parts
        [tensor([[2, 3, 4]]), tensor([[5, 6],
                [1, 0]])]
    """
    spans = [extents.spans_of(group, multiple_of) for group in rows]
    device = next((leaf.device for leaf in list_tensors(batch).values()), None)
    # One copy to a device for all groups.
    order = torch.tensor(list(itertools.chain.from_iterable(rows)), device=device)
    parts: list[Any] = []
    for group, places, span in zip(rows, order.split(list(map(len, rows))), spans, strict=True):
        parts.append(_take(batch, extents, list(group), places, span))
    return TrimmedParts(parts, list(map(list, rows)), spans, extents)


def _take(batch: object, extents: Extents, rows: list[int], places: Tensor, spans: Ends) -> Any:
    cuts: dict[str, list[tuple[int, list[int]]]] = {}
    for axis, span in zip(extents.padding.axes, spans, strict=True):
        for path, along in axis.members:
            for one in along:
                cuts.setdefault(path, []).append((one, span))

    def take(leaf: object, path: str) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            for axis, (start, stop) in cuts.get(path, ()):
                leaf = leaf.narrow(axis, start, stop - start)
            return leaf.index_select(0, places.to(leaf.device))
        if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
            for axis, (start, stop) in cuts.get(path, ()):
                leaf = leaf.take(range(start, stop), axis)
            return leaf[rows]
        if isinstance(leaf, list | tuple) and len(leaf) == len(extents.rows):
            return type(leaf)(map(leaf.__getitem__, rows))
        return leaf

    return walk_leaves(batch, take, "batch")
