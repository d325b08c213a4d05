"""A rolling limit for a value, from the quantiles of the latest steps."""

import math
from collections import deque

import numpy as np


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

    def __init__(self, far: float, window: int, after: int) -> None:
        self.far, self.after = far, after
        self.values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        if math.isfinite(value):  # otherwise infinity would be the limit from then on
            self.values.append(value)

    @property
    def value(self) -> float:
        if len(self.values) < self.after:
            return math.inf
        low, middle, high = np.quantile(self.values, (0.1, 0.5, 0.9)).tolist()
        return middle + self.far * max(high - low, 0.01 * abs(middle))
