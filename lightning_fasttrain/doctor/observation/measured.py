"""Times of the watched steps: by phase, and by line of the user's code."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_fasttrain.doctor.observation.line_times import Running, Sampled
from lightning_fasttrain.doctor.observation.source_lines import SourceLine


class LineTime(NamedTuple):
    """Milliseconds of a step at a line of the user's code, and the number of samples behind them."""

    line: SourceLine
    ms: float
    samples: int


@dataclass(frozen=True)
class Measured:
    """Times of steps.

    Attributes:
        times: milliseconds of each step by phase, with "other" and "step".
        sampled: what was running in these steps.
    """

    times: Sequence[Mapping[str, float]]
    sampled: Mapping[Running, Sampled]

    @property
    def step_ms(self) -> float:
        """Typical time of a step; 0 if none was measured."""
        return self.typical("step")

    def all_ms(self, phase: str) -> list[float]:
        """Return the time of a phase in each step."""
        return [times[phase] for times in self.times]

    def typical(self, phase: str) -> float:
        """Return the mean time of a phase over all steps but the slowest fifth, so that phases add up to the step.

        Other work of the machine only adds time, in a few steps.
        """
        if not self.times:
            return 0.0
        quickest = sorted(self.times, key=lambda times: times["step"])
        return statistics.fmean(times[phase] for times in quickest[: len(quickest) - len(quickest) // 5])

    def lines(self, concerns: Callable[[Running], bool]) -> list[LineTime]:
        """Return the lines at which something that ``concerns`` accepts was running, the most expensive first."""
        seconds: dict[SourceLine, Sampled] = {}
        for running, sampled in self.sampled.items():
            line = running.call.line
            if line is not None and concerns(running):
                together = seconds.setdefault(line, Sampled())
                together.seconds += sampled.seconds
                together.samples += sampled.samples
        steps = max(len(self.times), 1)
        found = [LineTime(line, 1e3 * one.seconds / steps, one.samples) for line, one in seconds.items()]
        return sorted(found, key=lambda one: -one.ms)

    def line_ms(self, line: SourceLine) -> LineTime:
        """Return the time at one line."""
        found = self.lines(lambda running: running.call.line == line)
        return next(iter(found), LineTime(line, 0.0, 0))
