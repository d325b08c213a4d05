"""A dataset wrapper that returns unreadable samples as markers instead of raising in a worker."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read.

    Attributes:
        index: the index that was read.
        worker: the number of the worker process that read it; None: the training process itself.
        error: the exception's class and message, and where it was raised.
    """

    index: Any
    worker: int | None
    error: str

    def __str__(self) -> str:
        reader = "the training process" if self.worker is None else f"worker {self.worker}"
        return f"sample {self.index!r}, read by {reader}: {self.error}"


@dataclass
class Envelope:
    """A batch together with its unreadable samples; it supports the operations of a batch.

    Attributes:
        batch: None if no sample could be read.
        bad: the samples that could not be read.
    """

    batch: Any
    bad: list[BadSample]

    # torch calls this method on batches of unknown types.
    def pin_memory(self) -> "Envelope":
        return Envelope(pin_memory(self.batch), self.bad)


class TolerantDataset(Dataset[Any]):
    """Returns a :class:`BadSample` where the dataset raises.

    Args:
        inner: a map-style dataset.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        if callable(getattr(inner, "__getitems__", None)):
            # Set on the object: torch reads samples together if the dataset has this method, and not every dataset
            # does.
            self.__getitems__ = self._read_several

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.inner[index]
        except Exception as error:
            info = get_worker_info()
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            # As text, since not every exception can be pickled for the way back from a worker.
            return BadSample(index, None if info is None else info.id, f"{type(error).__name__}: {error} ({where})")

    def _read_several(self, indices: list[Any]) -> list[Any]:
        try:
            return self.inner.__getitems__(indices)
        except Exception:  # read one by one to find which of them failed
            return [self[index] for index in indices]


class Sieve:
    """Collates the samples that could be read.

    Args:
        collate: the loader's own ``collate_fn``.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Envelope:
        if isinstance(samples, BadSample):  # a loader with batch_size=None
            return Envelope(None, [samples])
        if not isinstance(samples, list):
            return Envelope(self.collate(samples), [])
        bad = [sample for sample in samples if isinstance(sample, BadSample)]
        good = [sample for sample in samples if not isinstance(sample, BadSample)]
        return Envelope(self.collate(good) if good else None, bad)
