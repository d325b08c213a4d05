"""Measure how much of some batches seems to be padding, and how much of it micro-batches would still run."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_fasttrain.core.batch.contents import is_integer
from lightning_fasttrain.core.batch.find_padding import Proposal, likeliest_padding, propose_padding
from lightning_fasttrain.core.batch.group_rows import group_rows_evenly
from lightning_fasttrain.core.batch.leaves import list_leaves
from lightning_fasttrain.core.batch.padded_axes import Extents
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

    Example:
        >>> import torch
        >>> ids = torch.tensor([[5, 6] + [0] * 62, [7] * 64, *[[8] + [0] * 63] * 14])
        >>> print(measure_padding([{"input_ids": ids, "attention_mask": (ids != 0).long()}]))
        92% of the tokens of 1 batch seem to be padding (['attention_mask'] = 0): MicroBatching(8) would run ×0.18 of...
    """

    def __init__(self) -> None:
        self.batches = self.padded = self.filled = 0
        self.left = 0.0
        self._source = ""

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
        self._source = str(extents.padding)

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
            f"{self.share:.0%} of the tokens of {batches} seem to be padding ({self._source}): MicroBatching({_PARTS}) "
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
