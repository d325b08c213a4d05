"""How a rate runs over a training: closed forms, each a function of the place in the run, and of nothing before it.

The factor of step k (from 0) of n, with w steps of warm-up, is (k + 1) / w within the warm-up, whose last step has the
whole rate; after it, with p = (k - w) / (n - w) from 0 to 1, and f the factor at the end:

    linear        1 - (1 - f) p
    cosine        f + (1 - f) (1 + cos πp) / 2
    exponential   f^p
    inverse-sqrt  √(w / (k + 1))
    step          by^m, with m the marks that k has passed
    wsd           1, and over the last `decay` steps of the run linearly down to f
    one-cycle     from 1/25 up along a cosine within the warm-up, then down along one to f at the last step

On a clock of samples or tokens, k is what was seen before the step, and k + 1 that with the step's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

_START_OF_CYCLE = 1 / 25


@dataclass(frozen=True)
class Place:
    """Where a step is in a run, in the numbers of one clock.

    Attributes:
        before: what was counted before the step.
        after: that, and the step itself.
        warmup: when the warm-up ends; 0: there is none.
        total: when the run ends.
        final: the factor at the end.
        marks: of ``step``: when the rate falls.
        by: of ``step``: the factor at each mark.
        decay: of ``wsd``: how long the decay at the end lasts.
    """

    before: float
    after: float
    warmup: float = 0.0
    total: float = math.inf
    final: float = 0.0
    marks: tuple[float, ...] = ()
    by: float = 0.1
    decay: float = 0.0

    @property
    def share(self) -> float:
        """How much of the way from the warm-up to the end lies behind, from 0 to 1."""
        return _share(self.before, self.warmup, self.total)


def _share(now: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, now - start) / (end - start)) if end > start else 1.0


def _fall(share: float, to: float) -> float:
    return to + (1 - to) * (1 + math.cos(math.pi * share)) / 2


def _constant(place: Place) -> float:
    return 1.0


def _linear(place: Place) -> float:
    return 1 - (1 - place.final) * place.share


def _cosine(place: Place) -> float:
    return _fall(place.share, place.final)


def _exponential(place: Place) -> float:
    return place.final**place.share


def _inverse_sqrt(place: Place) -> float:
    return math.sqrt(place.warmup / max(place.after, place.warmup))


def _step(place: Place) -> float:
    passed = [mark for mark in place.marks if mark <= place.before]
    return place.by ** len(passed)


def _wsd(place: Place) -> float:
    start = max(place.warmup, place.total - place.decay)
    return 1 - (1 - place.final) * _share(place.before, start, place.total)


def _one_cycle(place: Place) -> float:
    top, last = place.warmup - 1, place.total - 1  # the steps of the whole rate, and of the least
    if place.before < top:
        return 1 - (1 - _START_OF_CYCLE) * _fall(place.before / top, 0.0)
    return _fall(_share(place.before, top, last), place.final)


SHAPES: dict[str, Callable[[Place], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse-sqrt": _inverse_sqrt,
    "exponential": _exponential,
    "step": _step,
    "one-cycle": _one_cycle,
    "wsd": _wsd,
}
ENDLESS = ("constant", "inverse-sqrt")  # these need no total


def factor_at(shape: str, place: Place) -> float:
    """By what the rate is multiplied there.

    Example:
        >>> [factor_at("linear", Place(k, k + 1, warmup=2, total=6)) for k in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if shape != "one-cycle" and place.before < place.warmup:
        return min(1.0, place.after / place.warmup)
    return SHAPES[shape](place)
