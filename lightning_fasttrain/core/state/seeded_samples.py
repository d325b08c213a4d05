"""Samples that draw from generators seeded for each of them, whoever reads them and in which order."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class SeededSamples(Dataset[Any]):
    """Reads each sample with the generators of torch (on the CPU), Python and NumPy seeded by the pass and its index.

    A sample then depends neither on the worker that reads it nor on the samples read before. The generators are
    restored afterwards, so that a loader without workers takes no numbers from training.

    Args:
        inner: a map-style dataset.
        seed: that of the pass over the data.
    """

    def __init__(self, inner: Any, seed: str) -> None:
        self.inner, self.seed = inner, seed
        if callable(getattr(inner, "__getitems__", None)):
            # Set on the object: torch reads samples together if the dataset has this method.
            self.__getitems__ = self._read_several

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for by copy and pickle, before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> Any:
        with seeded(f"{self.seed} {index}"):
            return self.inner[index]

    def _read_several(self, indices: list[Any]) -> list[Any]:
        with seeded(f"{self.seed} {indices}"):
            return self.inner.__getitems__(indices)


@contextmanager
def seeded(text: str) -> Iterator[None]:
    """Seed the generators of torch (on the CPU), Python and NumPy by ``text``, and restore them afterwards.

    Example:
        >>> with seeded("epoch 3"):
        ...     first = torch.rand(1)
        >>> with seeded("epoch 3"):
        ...     torch.equal(torch.rand(1), first)
        True
    """
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    # torch.manual_seed would seed CUDA too, which training draws from.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
