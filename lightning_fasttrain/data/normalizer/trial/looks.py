"""Decide which batches of a run are examined again."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_fasttrain.core.distributed import from_all_ranks


class Looks:
    """Decides which batches are examined again: 2, 4, 8, ... while that takes under 1% of the time so far.

    Args:
        from_first: whether the first batch is one of them.

    Attributes:
        seconds: time spent on examining batches.

    Example:
        >>> looks = Looks()
        >>> [looks.is_due(lambda: True) for _ in range(8)]
        [False, True, False, True, False, False, False, True]
    """

    def __init__(self, *, from_first: bool = False) -> None:
        self.seconds = 0.0
        self._batches = 0
        self._first = 1 if from_first else 2
        self._began = time.monotonic()

    def is_due(self, is_wanted: Callable[[], bool]) -> bool:
        """Count a batch, and return whether it is examined again.

        Args:
            is_wanted: whether examining could show anything. All ranks are asked, and all must want it.
        """
        self._batches += 1
        if self._batches < self._first or self._batches & (self._batches - 1):
            return False
        is_cheap = self.seconds < 0.01 * (time.monotonic() - self._began)
        told = from_all_ranks([(is_wanted(), is_cheap)])
        return all(each for each, _ in told) and told[0][1]  # decided by the first rank, as clocks differ

    @property
    def has_begun(self) -> bool:
        """Whether a batch has been counted."""
        return self._batches > 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the time spent on examining a batch in the context."""
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began
