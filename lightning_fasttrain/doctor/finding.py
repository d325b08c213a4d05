"""A finding: what costs time or memory in a step, at which line of the user's code, and what to do about it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fasttrain.core.messages import format_bytes, format_ms
from lightning_fasttrain.doctor.observation.source_lines import SourceLine
from lightning_fasttrain.planner.timing import Ratio, compare_times


@dataclass(frozen=True)
class Cost:
    """The cost of a finding in each step, with the interval that contains it with a confidence of 95%.

    Attributes:
        value, low, high: the cost and its interval.
        unit: "ms" or "bytes", of a step; "" if it was not measured.
        is_gain: whether the cure was tried and this is the measured gain, rather than the measured cost.
    """

    value: float
    low: float
    high: float
    unit: str = "ms"
    is_gain: bool = False

    @classmethod
    def unmeasured(cls) -> "Cost":
        """Return the cost of what is known to cost time, and was not measured."""
        return cls(0.0, 0.0, 0.0, unit="")

    def __str__(self) -> str:
        if not self.unit:
            return "not measured"
        if self.unit == "bytes":
            return f"{format_bytes(self.value)}/step"
        return f"{format_ms(self.value)} ms/step ({format_ms(max(0.0, self.low))} to {format_ms(self.high)})"


def cost_of_ratio(base_ms: float, ratio: Ratio, *, is_gain: bool) -> Cost:
    """Return the cost that a step of ``base_ms`` would lose if it took ``ratio`` times as long.

    Example:
        >>> cost_of_ratio(10.0, Ratio(0.8, 0.75, 0.85), is_gain=True).value
        2.0
    """
    value, low, high = (base_ms * (1 - part) for part in (ratio.value, ratio.high, ratio.low))
    return Cost(round(value, 6), round(low, 6), round(high, 6), is_gain=is_gain)


def cost_of_phase(step_ms: Sequence[float], phase_ms: Sequence[float]) -> Cost:
    """Return the cost of a phase from the times of the steps and of the phase in each of them.

    Example:
        >>> round(cost_of_phase([10.0, 10.0, 10.0], [4.0, 4.0, 4.0]).value, 3)
        4.0
    """
    without = []
    for step, phase in zip(step_ms, phase_ms, strict=True):
        without.append(max(step - phase, 1e-6))
    return cost_of_ratio(statistics.median(step_ms), compare_times(step_ms, without), is_gain=False)


def cost_of_samples(ms: float, samples: int) -> Cost:
    """Return a cost that was measured by sampling the running line; the number of samples gives the interval.

    Args:
        ms: milliseconds of a step.
        samples: number of samples that hit the line.
    """
    # The standard deviation of a Poisson count is its square root.
    relative = 1.96 / max(samples, 1) ** 0.5
    return Cost(ms, max(0.0, ms * (1 - relative)), ms * (1 + relative))


def cost_of_calls(seconds: Sequence[float], steps: int) -> Cost:
    """Return the cost of calls that were timed one by one, spread over the steps in which they ran.

    Example:
        >>> cost_of_calls([0.01, 0.01], steps=4).value
        5.0
    """
    ms = 1e3 * sum(seconds) / steps
    # One call says nothing about its spread.
    half = ms
    if len(seconds) > 1:
        half = 1.96 * 1e3 * statistics.stdev(seconds) * len(seconds) ** 0.5 / steps
    return Cost(ms, max(0.0, ms - half), ms + half)


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    Attributes:
        kind: name of the fault, such as "host_sync"; stable, for programs.
        what: one sentence on what was seen, with its numbers.
        cure: one line that mends it.
        exactness: "exact", "to rounding", or what the cure changes about the training.
        line: the user's own line; None if none could be found.
        cost: what it costs in each step; None for a fault of the training itself, which costs accuracy instead.
        details: further sentences, such as the most expensive lines of a phase.
    """

    kind: str
    what: str
    cure: str
    exactness: str
    line: SourceLine | None = None
    cost: Cost | None = None
    details: tuple[str, ...] = ()

    def share_of(self, step_ms: float) -> float:
        """Return the share of a step's time that it costs; 0 where the cost is not a time."""
        if self.cost is None or self.cost.unit != "ms" or step_ms <= 0:
            return 0.0
        return self.cost.value / step_ms
