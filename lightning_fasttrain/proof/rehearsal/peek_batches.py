"""Peek at batches of a run's loaders without consuming them."""

import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fasttrain.checkpoint.loader_state.attributes import watch_attributes
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import ResumableLoader
from lightning_fasttrain.core.batch import count_bytes
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.loaders.device_prefetch import DevicePrefetcher
from lightning_fasttrain.proof.rehearsal.rehearsal_report import RehearsalError

_SAME_SIZE = 16  # batches of the same size: from here on all others are assumed to have it
_MOST = 500


@dataclass
class Sample:
    """A sample of the batches of a loader.

    Attributes:
        first: its first batches.
        largest: the largest of all batches that were read, in bytes; None if it is not larger than the first ones.
        seen: number of batches that were read.
    """

    first: list[Any] = field(default_factory=list)
    largest: Any = None
    seen: int = 0


def combine(loader: object) -> CombinedLoader:
    """Return a loader, or a collection of loaders, as Lightning combines them for training."""
    return loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")


@contextmanager
def reading_ahead(loaders: CombinedLoader) -> Iterator[Iterator[Any]]:
    """Iterate over a run's loaders from their beginning; random states, including the loaders' own, are restored.

    The loaders are copied, but not their data: what a dataset holds beyond plain values may change while it is read.

    Raises:
        RehearsalError: a loader is an iterator, so the run could not read its batches again.
    """
    plain = list(map(_without_ours, loaders.flattened))
    for loader in plain:
        if isinstance(loader, Iterator):
            why = "the run could not read its first batches again"
            way_out = "Pass a DataLoader, or an object whose __iter__ starts over; or remove Rehearsal"
            raise RehearsalError(explain(f"the loader is a {type(loader).__name__}", why, way_out))
    numbers = random_state()
    watched = list(map(watch_attributes, plain))
    changes = [attributes.changes() for attributes in watched]
    # A copy keeps the mode in which the loaders are combined.
    fresh = copy.copy(loaders)
    fresh.flattened = list(map(_copy_loader, plain))
    try:
        # CombinedLoader yields (batch, its index, the index of its loader).
        yield map(itemgetter(0), iter(fresh))
    finally:
        fresh.reset()  # ends the workers
        for attributes, then in zip(watched, changes, strict=True):
            attributes.restore(then)
        set_random_state(numbers)


def take_sample(loaders: CombinedLoader, first: int, seconds: float) -> Sample:
    """Read the first batches, and further ones for ``seconds`` seconds as long as their sizes differ.

    Args:
        loaders: the loaders of the run, which are not changed.
        first: number of batches that are kept.
        seconds: time limit for the further batches.
    """
    sample = Sample()
    with reading_ahead(loaders) as batches:
        sample.first = list(itertools.islice(batches, first))
        sizes = list(map(count_bytes, sample.first))
        most, end = max(sizes, default=0), time.monotonic() + seconds
        while time.monotonic() < end and len(sizes) < _MOST and not _have_one_size(sizes):
            batch = next(batches, None)
            if batch is None:
                break
            sizes.append(count_bytes(batch))
            if sizes[-1] > most:
                most, sample.largest = sizes[-1], batch
    sample.seen = len(sizes)
    return sample


def describe_batch(batch: object) -> str:
    """Describe a batch by the shape of its largest tensor.

    Example:
        >>> import torch
        >>> describe_batch({"ids": torch.zeros(2, 3), "lengths": torch.zeros(2)})
        '2 × 3'
    """
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    if largest is None:
        return type(batch).__name__
    return " × ".join(map(str, largest.shape)) or "a scalar"


def _have_one_size(sizes: list[int]) -> bool:
    return len(sizes) >= _SAME_SIZE and len(set(sizes)) == 1


def _without_ours(loader: object) -> Any:
    """Return the user's loader, without the wrappers of this run's techniques."""
    while isinstance(loader, ResumableLoader | DevicePrefetcher):
        loader = loader.inner
    return loader


def _copy_loader(loader: object) -> Any:
    if not isinstance(loader, DataLoader):
        return loader
    fresh = copy.copy(loader)
    fresh._iterator = None  # persistent workers belong to the run
    return fresh
