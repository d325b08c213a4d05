"""Reads batches of a run's loaders ahead of the run, which then finds them as if nobody had."""

import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fasttrain.core.batch import count_bytes
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.data.loaders.device_prefetch import DevicePrefetcher
from lightning_fasttrain.dry_run.rehearsal.rehearsal_report import RehearsalError
from lightning_fasttrain.run.checkpoint.loader_rng import generator_state, generators_of, set_generator_state
from lightning_fasttrain.run.checkpoint.resumable_loader import ResumableLoader

_ALIKE = 16  # batches of one size: from here on the others are taken to have it too
_MOST = 500


@dataclass
class Sample:
    """A few batches of a loader.

    Attributes:
        first: its first ones.
        largest: the one with most bytes among all that were seen; None if it is no larger than the first ones.
        seen: how many were.
    """

    first: list[Any] = field(default_factory=list)
    largest: Any = None
    seen: int = 0


@contextmanager
def reading_ahead(loaders: CombinedLoader) -> Iterator[Iterator[Any]]:
    """Iterate over a run's loaders from their beginning; random states are put back, and so are the loaders' own.

    The loaders are copied, not their data: a dataset that changes when it is read in this process stays changed.

    Raises:
        RehearsalError: one is an iterator, which the run could then not read.
    """
    plain = [_without_ours(loader) for loader in loaders.flattened]
    for loader in plain:
        if isinstance(loader, Iterator):
            why = "what is read of it ahead the run could not read again"
            way_out = "Give a DataLoader, or an object whose __iter__ starts over; or leave Rehearsal out"
            raise RehearsalError(explain(f"the loader is a {type(loader).__name__}", why, way_out))
    numbers = random_state()
    states = [(generator, generator_state(generator)) for generator in generators_of(*plain)]
    fresh = copy.copy(loaders)  # it keeps the mode in which the loaders are combined
    fresh.flattened = [_copy_loader(loader) for loader in plain]
    try:
        yield (item[0] for item in iter(fresh))  # of batch, its number, and its loader's number
    finally:
        fresh.reset()  # which ends the workers
        for generator, state in states:
            set_generator_state(generator, state)
        set_random_state(numbers)


def take_sample(loaders: CombinedLoader, first: int, seconds: float) -> Sample:
    """Read the first batches, and further ones, as long as their sizes differ, for so many seconds.

    Args:
        loaders: of the run; left as they are.
        first: how many are kept.
        seconds: for the further ones.
    """
    sample = Sample()
    with reading_ahead(loaders) as batches:
        sample.first = list(itertools.islice(batches, first))
        sizes = [count_bytes(batch) for batch in sample.first]
        most, end = max(sizes, default=0), time.monotonic() + seconds
        while time.monotonic() < end and len(sizes) < _MOST and not _are_alike(sizes):
            batch = next(batches, None)
            if batch is None:
                break
            sizes.append(count_bytes(batch))
            if sizes[-1] > most:
                most, sample.largest = sizes[-1], batch
    sample.seen = len(sizes)
    return sample


def describe_batch(batch: Any) -> str:
    """The shape of its largest tensor.

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
    return " × ".join(map(str, largest.shape)) or "one number"


def _are_alike(sizes: list[int]) -> bool:
    return len(sizes) >= _ALIKE and len(set(sizes)) == 1


def _without_ours(loader: Any) -> Any:
    """The user's loader, without what techniques of this run have put around it."""
    while isinstance(loader, ResumableLoader | DevicePrefetcher):
        loader = loader.inner
    return loader


def _copy_loader(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        return loader
    fresh = copy.copy(loader)
    fresh._iterator = None  # persistent workers are the run's
    return fresh
