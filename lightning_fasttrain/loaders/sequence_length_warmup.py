"""Sequence length warmup: short sequences at first, and longer ones later."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch.leaves import list_tensors, walk_leaves
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.loaders.growth_schedule import GrowingBatches, Growth, grow_batches
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import Facts
from lightning_fasttrain.technique.duration import LENGTHS, Length

_IDS = (torch.int64, torch.int32)
Cut = Callable[[Any, int], Any]


@check_arguments
def cut_sequences(batch: object, length: PositiveInt) -> Any:
    """Return the first ``length`` tokens of each sequence of ``batch``; shorter sequences stay unchanged.

    The rule: the length T is the second axis of the first tensor that looks like token ids (integers of 32 or 64 bits,
    at least two axes). In integer and boolean tensors (ids, labels, masks, positions) each axis after the first that
    has length T is cut; in others (embeddings) the second, and in masks [..., T, T] the last two. Floating-point
    tensors (B, T) are cut if their name contains "mask" or "weight"; otherwise they may be scores of T classes.
    Containers are traversed, and keep their type.

    Where an ``attention_mask``, or a boolean ``..._padding_mask`` (B, T), shows that rows begin with padding, the
    tokens of such a row are counted from the end of its padding, and a row shorter than ``length`` keeps padding in
    front. The device is not synchronized.

    Args:
        batch: tensors of shape (B, T, ...), in any nesting.
        length: at least 1.

    Raises:
        ValueError: no tensor looks like token ids.

    Example:
        >>> batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "mask": torch.ones(2, 1, 6, 6)}
        >>> [tuple(tensor.shape) for tensor in cut_sequences(batch, 4).values()]
        [(2, 4), (2, 1, 4, 4)]
    """
    full = find_length(batch)
    if full <= length:
        return batch

    real = _find_real_tokens(batch, full)
    start = None
    if real is not None:
        # argmax returns the first maximum: the first token that is not padding, or 0 where all are.
        start = real.to(torch.uint8).argmax(dim=1).clamp(max=full - length)

    def cut(leaf: object, path: str) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for axis in _axes_of_tokens(leaf, path, full):
            if start is not None and len(leaf) == len(start):
                leaf = _window(leaf, axis, start, length)
            else:
                leaf = leaf.narrow(axis, 0, length)
        return leaf.contiguous()  # models may call view()

    return walk_leaves(batch, cut, "batch")


def _axes_of_tokens(leaf: Tensor, path: str, full: int) -> list[int]:
    axes = [axis for axis in range(1, leaf.ndim) if leaf.shape[axis] == full]
    if not leaf.is_floating_point() or (leaf.ndim > 2 and axes[-2:] == [leaf.ndim - 2, leaf.ndim - 1]):
        return axes
    if leaf.ndim == 2 and not re.search("mask|weight", path):
        return []
    return list({1}.intersection(axes))


def _find_real_tokens(batch: object, full: int) -> Tensor | None:
    """Return (B, T), True for real tokens; None where no such mask exists."""
    for path, leaf in list_tensors(batch).items():
        if leaf.ndim == 2 and leaf.shape[1] == full and not leaf.is_floating_point():
            if re.search(r"\battention_mask\b", path):
                return leaf != 0
            if re.search(r"padding_mask\b", path) and leaf.dtype is torch.bool:  # torch's convention: True is padding
                return ~leaf
    return None


def _window(leaf: Tensor, axis: int, start: Tensor, length: int) -> Tensor:
    """Return ``length`` entries along ``axis``, starting at each row's own ``start``."""
    places = start[:, None] + torch.arange(length, device=start.device)
    shape = [1] * leaf.ndim
    shape[0], shape[axis] = places.shape
    return leaf.take_along_dim(places.view(shape), axis)


def find_length(batch: object) -> int:
    """Return the length of the sequences in a batch, by the rule of :func:`cut_sequences`."""
    for leaf in list_tensors(batch).values():
        if leaf.ndim > 1 and leaf.dtype in _IDS:
            return leaf.shape[1]
    why = "no integer tensor has a second axis, so the length of its sequences is unknown"
    raise ValueError(explain(f"a batch of type {type(batch).__name__}", why, "Give cut=(batch, length) → batch"))


@check_arguments
def grow_sequences(
    batches: Iterable[object], growth: Growth, window: PositiveInt = 1, cut: Cut = cut_sequences
) -> Iterator[Any]:
    """Yield the batches with their sequences cut to ``growth.size``, which grows.

    Args:
        batches: the batches of an epoch.
        growth: counts batches, and continues over epochs if it is passed to each; its state can be resumed.
        window: number of batches per optimizer step.
        cut: (batch, length) → batch.

    Example:
        >>> batches = [torch.zeros(2, 6, dtype=torch.long)] * 4
        >>> [batch.shape[1] for batch in grow_sequences(batches, Growth(2, 6, over=3, grid=2))]
        [2, 2, 4, 6]
    """
    yield from grow_batches(batches, growth, window, cut)


class SequenceLengthWarmup(GrowingBatches):
    """Start with the first ``start`` tokens of each sequence, and grow to ``full`` in equal increments of ``grid``.

    Short sequences cost less, and early in a run they are as informative; steps are more stable, too. Tokens beyond the
    length are not trained on. Samples and tokens are counted as trained on, over all processes; if the growth depends
    on them, processes synchronize once a batch until it ends.

    Acts on a training batch after its transfer to the device, before any other use; validation sees complete sequences.
    A compiled model is recompiled for some of the lengths; a large ``grid`` reduces their number.

    Args:
        start: number of tokens per sequence at first.
        full: number of tokens per sequence at the end of the growth; batches are unchanged from then on.
        over: duration of the growth: optimizer steps, ``"1ep"``, ``"5%"`` of the run, ``"1e6 samples"``, ``"1e9tok"``.
        grid: lengths are ``start`` plus multiples of this; 8 suits matrix units.
        cut: (batch, length) → batch, for batches that :func:`~lightning_fasttrain.loaders.cut_sequences` refuses.

    Attributes:
        growth: the current ``size``, and the numbers of ``samples`` and ``tokens`` so far.

    Raises:
        TypeError, ValueError: sizes that do not grow, or a duration that cannot be parsed; in ``fit``: the length of
            the run is unknown, or a batch has no token ids.

    Example:
        >>> warmup = SequenceLengthWarmup(start=64, full=1024, over="5%", grid=64)

    Source:
        Li et al. 2022, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
        Models", https://arxiv.org/abs/2108.06084.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    ways_out: ClassVar[Mapping[str, str]] = {"over": LENGTHS}
    effect: ClassVar[str] = "short sequences at first, of growing length: cheaper and more stable early steps"
    when: ClassVar[str] = "training on long sequences is unstable at first; not where the ends of sequences matter"
    in_a_loop: ClassVar[str] = "for batch in loaders.grow_sequences(loader, growth)"
    predicted: ClassVar[bool] = True

    def __init__(self, start: int, full: int, over: int | str | Length, grid: int = 8, cut: Cut | None = None) -> None:
        self.growth = Growth(start, full, over, grid)
        if cut is not None and not callable(cut):
            raise TypeError(explain(f"cut={cut!r}", "expected a function of a batch and a length", "Give a function"))
        self.cut = cut or cut_sequences

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return "images are no sequences" if facts.batch == "images" else None

    def describe_effect(self, model: nn.Module) -> str:
        growth = self.growth
        return f"sequences grow from {growth.start} to {growth.full} tokens over {growth.over}"

    def change(self, batch: object, size: int) -> Any:
        return self.cut(batch, size)
