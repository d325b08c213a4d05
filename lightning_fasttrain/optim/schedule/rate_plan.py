"""Closed forms of learning rate schedules, each a function of the position in the run alone.

The factor of step k (from 0) of n, with w steps of warmup, is (k + 1) / w within the warmup, whose last step has the
full learning rate; after it, with p = (k - w) / (n - w) from 0 to 1, and f the factor at the end:

    linear        1 - (1 - f) p
    cosine        f + (1 - f) (1 + cos πp) / 2
    exponential   f^p
    inverse-sqrt  √(w / (k + 1))
    step          by^m, with m the number of marks that k has passed
    wsd           1, and over the last `decay` steps of the run linearly down to f
    one-cycle     from 1/25 up along a cosine within the warmup, then down along one to f at the last step

On a clock of samples or tokens, k is the number seen before the step, and k + 1 that including the step's own.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_START_OF_CYCLE = 1 / 25  # torch's ``div_factor``


@dataclass(frozen=True)
class RatePlan:
    """A learning rate schedule over a run, in units of one clock.

    Attributes:
        shape: the name of the shape.
        clock: the unit: ``"steps"``, ``"samples"`` or ``"tokens"``.
        warmup: the end of the warmup; 0 for none.
        total: the end of the run.
        final: the factor at the end.
        marks: for ``step``: when the learning rate falls.
        by: for ``step``: the factor at each mark.
        decay: for ``wsd``: the duration of the decay at the end.
    """

    shape: str
    clock: str = "steps"
    warmup: float = 0.0
    total: float = math.inf
    final: float = 0.0
    marks: tuple[float, ...] = ()
    by: float = 0.1
    decay: float = 0.0

    def factor(self, before: float, after: float) -> float:
        """Return the factor of the learning rate in a step, from the counts before and after it.

        Example:
            >>> plan = RatePlan("linear", warmup=2, total=6)
            >>> [plan.factor(k, k + 1) for k in range(6)]
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if self.shape != "one-cycle" and before < self.warmup:
            return min(1.0, after / self.warmup)
        return SHAPES[self.shape](self, before, after)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {**asdict(self), "marks": list(self.marks)}


Shape = Callable[[RatePlan, float, float], float]


def _share(now: float, start: float, end: float) -> float:
    """Return the completed share of an interval, from 0 to 1."""
    return min(1.0, max(0.0, now - start) / (end - start)) if end > start else 1.0


def _fall(share: float, to: float) -> float:
    """Decay from 1 along half a cosine."""
    return to + (1 - to) * (1 + math.cos(math.pi * share)) / 2


def _constant(plan: RatePlan, before: float, after: float) -> float:
    return 1.0


def _linear(plan: RatePlan, before: float, after: float) -> float:
    return 1 - (1 - plan.final) * _share(before, plan.warmup, plan.total)


def _cosine(plan: RatePlan, before: float, after: float) -> float:
    return _fall(_share(before, plan.warmup, plan.total), plan.final)


def _exponential(plan: RatePlan, before: float, after: float) -> float:
    return plan.final ** _share(before, plan.warmup, plan.total)


def _inverse_sqrt(plan: RatePlan, before: float, after: float) -> float:
    return math.sqrt(plan.warmup / max(after, plan.warmup))


def _step(plan: RatePlan, before: float, after: float) -> float:
    passed = [mark for mark in plan.marks if mark <= before]
    return plan.by ** len(passed)


def _wsd(plan: RatePlan, before: float, after: float) -> float:
    start = max(plan.warmup, plan.total - plan.decay)
    return 1 - (1 - plan.final) * _share(before, start, plan.total)


def _one_cycle(plan: RatePlan, before: float, after: float) -> float:
    top, last = plan.warmup - 1, plan.total - 1  # the steps with the largest and the smallest learning rate
    if before < top:
        return 1 - (1 - _START_OF_CYCLE) * _fall(before / top, 0.0)
    return _fall(_share(before, top, last), plan.final)


SHAPES: dict[str, Shape] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse-sqrt": _inverse_sqrt,
    "exponential": _exponential,
    "step": _step,
    "one-cycle": _one_cycle,
    "wsd": _wsd,
}
ENDLESS = ("constant", "inverse-sqrt")  # shapes that need no total
