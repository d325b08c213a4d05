"""A limit above the recent values of a number, by its running quantiles."""

import bisect
import math
from collections import deque

from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt


class RunningLimit:
    """A limit above the running quantiles: median + far · (9th decile − 1st decile), over the latest good steps.

    A band close to zero, as for a constant loss, is replaced by 1% of the median.

    Args:
        far: number of bands above the median.
        window: number of steps that are kept.
        after: number of steps before there is a limit.

    Example:
        >>> limit = RunningLimit(far=4, window=10, after=5)
        >>> for value in [1.0, 1.1, 0.9, 1.0]:
        ...     limit.add(value)
        >>> limit.value
        inf
        >>> limit.add(1.0)
        >>> round(limit.value, 6)
        1.48
    """

    def __init__(self, far: PositiveFloat, window: PositiveInt, after: PositiveInt) -> None:
        self.far, self.after = far, after
        self.values: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        # Otherwise infinity would be the limit from then on.
        if not math.isfinite(value):
            return
        if len(self.values) == self.values.maxlen:
            del self._ordered[bisect.bisect_left(self._ordered, self.values[0])]
        self.values.append(value)
        bisect.insort(self._ordered, value)

    @property
    def value(self) -> float:
        if len(self.values) < self.after:
            return math.inf
        low, middle, high = (_quantile(self._ordered, share) for share in (0.1, 0.5, 0.9))
        return middle + self.far * max(high - low, 0.01 * abs(middle))


Limits = tuple[RunningLimit, RunningLimit]  # of the loss, and of the norm of its gradient


def _quantile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated; NumPy's takes a hundred times as long."""
    below, part = divmod(share * (len(ordered) - 1), 1)
    above = ordered[min(int(below) + 1, len(ordered) - 1)]
    return ordered[int(below)] + part * (above - ordered[int(below)])
