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
from dataclasses import asdict, dataclass
from typing import Any

_START_OF_CYCLE = 1 / 25  # torch's ``div_factor``


@dataclass(frozen=True)
class RatePlan:
    """A course of the rate over a run, in the numbers of one clock.

    Attributes:
        shape: its name.
        clock: what is counted: ``"steps"``, ``"samples"`` or ``"tokens"``.
        warmup: when the warm-up ends; 0: there is none.
        total: when the run ends.
        final: the factor at the end.
        marks: of ``step``: when the rate falls.
        by: of ``step``: the factor at each mark.
        decay: of ``wsd``: how long the decay at the end lasts.
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
        """By what the rate is multiplied in a step before which, and with which, so much was counted.

        Example:
            >>> plan = RatePlan("linear", warmup=2, total=6)
            >>> [plan.factor(k, k + 1) for k in range(6)]
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if self.shape != "one-cycle" and before < self.warmup:
            return min(1.0, after / self.warmup)
        return SHAPES[self.shape](self, before, after)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {**asdict(self), "marks": list(self.marks)}


Shape = Callable[[RatePlan, float, float], float]


def _share(now: float, start: float, end: float) -> float:
    """How much of the way lies behind, from 0 to 1."""
    return min(1.0, max(0.0, now - start) / (end - start)) if end > start else 1.0


def _fall(share: float, to: float) -> float:
    """From 1 along half a cosine."""
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
    top, last = plan.warmup - 1, plan.total - 1  # the steps of the whole rate, and of the least
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
ENDLESS = ("constant", "inverse-sqrt")  # these need no total
