"""Passes over samples that are seeded one by one, so that a loader can skip samples without reading them."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.rng import SeededSamples
from lightning_fasttrain.run.checkpoint.loaders.loader_rng import generators_of


def refuse_unseedable(loader: object) -> None:
    """Refuse a loader whose samples depend on more than their index and the global generators.

    Raises:
        ValueError: not a DataLoader of a map-style dataset, or the dataset has generators of its own.
    """
    what, way_out = f"seed_samples=True with {type(loader).__name__}", "Use seed_samples=False for this loader"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError(explain(what, "only a DataLoader of a map-style dataset reads samples by index", way_out))
    if generators_of(loader.dataset):
        what = f"seed_samples=True with {type(loader.dataset).__name__}"
        why = "the dataset has generators of its own, whose states in the workers depend on the samples before"
        raise ValueError(explain(what, why, "Draw from the generators of torch, Python and NumPy instead"))


def seed_of_pass(start: Mapping[str, Any]) -> str:
    """Return a seed that follows from the random states at the start of a pass over the data."""
    digest = hashlib.sha256()
    for state in (start["random"]["torch"], *start["generators"]):
        digest.update(state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode())
    return digest.hexdigest()


@contextmanager
def seeded_rest(loader: DataLoader[object], seed: str, skipped: int) -> Iterator[None]:
    """Let a pass that is begun inside the context read seeded samples, without the first ``skipped`` batches."""
    # An iterator reads it when it is created. torch forbids setting it, hence vars().
    place, dataset = vars(loader), loader.dataset
    place["dataset"] = SeededSamples(dataset, seed)
    try:
        with skip_indices(loader, skipped):
            yield
    finally:
        place["dataset"] = dataset


@contextmanager
def skip_indices(loader: DataLoader[object], skipped: int) -> Iterator[None]:
    """Let a pass that is begun inside the context start after the indices of the first ``skipped`` batches."""
    place, indices = vars(loader), "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = place[indices]
    if skipped:
        place[indices] = _Rest(sampler, skipped)
    try:
        yield
    finally:
        place[indices] = sampler


class _Rest:
    """The entries of a sampler after the first ones, which are drawn and dropped."""

    def __init__(self, inner: Any, skipped: int) -> None:
        self.inner, self.skipped = inner, skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.inner), self.skipped, None)

    def __len__(self) -> int:
        return len(self.inner) - self.skipped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
