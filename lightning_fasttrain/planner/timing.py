"""Time steps on a copy of a model, compare times that vary, and estimate the times of choices from measurements."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from lightning_fasttrain.core.device import dtype_of, peak_flops
from lightning_fasttrain.memory import count_flops
from lightning_fasttrain.micro_batching import MicroBatching
from lightning_fasttrain.micro_batching.padding.trim_search import TrimSearch
from lightning_fasttrain.planner.candidates import Budget, Choice, switch_of
from lightning_fasttrain.proof.verification.short_run import FEWEST_TIMED, MOST_TIMED, StepClock, Steps, run_steps

PER_PART = 0.01  # share of a step for each micro-batch, until it is measured
_BF16 = 0.5
_WARMUP, _TO_PLAN = 1, 8  # steps that come before: a memory budget measures two, and then checks its plans
_RUNS, _START_S = 2, 0.5  # a run's Trainer and copy of the model take about this long
_COMPILE_MS = 30e3  # until it is measured

# Of Student's t distribution, by degrees of freedom from 1: 97.5% of it lies below.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
_TRIMMED = 5  # one of so many is cut off at each end


Switched = tuple[str, str | Budget]  # an axis and its word


@dataclass(frozen=True)
class Ratio:
    """The ratio of two times, and the interval that contains it with a confidence of 95%."""

    value: float
    low: float
    high: float

    @property
    def plus_minus(self) -> float:
        """Half the width of the interval, relative to the ratio."""
        return (self.high - self.low) / (2 * self.value)


def compare_times(base_ms: Sequence[float], other_ms: Sequence[float]) -> Ratio:
    """Return how many times as long the other program takes as the base, from times that were measured in turn.

    The two times of a turn follow each other, so whatever slows the machine for longer than that cancels in their
    ratio. Of the logarithms of these ratios the trimmed mean is taken, since a burst of other work between the two
    times of a turn may shift one ratio by any amount.

    Args:
        base_ms: time of the base in each turn.
        other_ms: time of the other program in the same turns.

    Returns:
        The ratio; of fewer than two turns, with an interval that excludes nothing.

    Raises:
        ValueError: the two have different numbers of turns.

    Example:
        >>> ratio = compare_times([100, 102, 150, 99], [80, 82, 118, 79])
        >>> f"{ratio.value:.2f} from {ratio.low:.2f} to {ratio.high:.2f}"
        '0.80 from 0.79 to 0.81'

    Source:
        Yuen 1974, https://doi.org/10.1093/biomet/61.1.165: Student's interval for a trimmed mean.
    """
    logs = sorted(math.log(other / base) for base, other in zip(base_ms, other_ms, strict=True))
    count, cut = len(logs), len(logs) // _TRIMMED
    kept = logs[cut : count - cut]
    mean = statistics.fmean(kept)
    if count < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    # Values that are cut off still count in the spread, as the nearest that is kept.
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    centre = statistics.fmean(winsorized)
    squares = sum((value - centre) ** 2 for value in winsorized)
    error = math.sqrt(squares / (len(kept) * (len(kept) - 1)))
    half = _T[min(len(kept) - 1, len(_T)) - 1] * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass
class Timed:
    """Measurements of a few steps.

    Attributes:
        step_ms: time of each step after the warm-up.
        first_ms: time of the first step, which includes compilation and allocation.
        peak_bytes: peak memory of the last step, if it was requested.
        trimming: what the run found out about padding; None without micro-batches.
    """

    step_ms: list[float]
    first_ms: float
    peak_bytes: int = 0
    trimming: TrimSearch | None = None

    @property
    def ms(self) -> float:
        """The fastest step, since other work of the machine only adds time."""
        return min(self.step_ms)


class Stopwatch:
    """Times steps on copies of a module.

    Args:
        module: the model, which is not changed.
        batch: the batch of each step.
        settings: Trainer settings, such as ``accelerator``.
    """

    def __init__(self, module: L.LightningModule, batch: object, settings: Mapping[str, Any]) -> None:
        self.module, self.batch, self.settings = module, batch, settings

    def time(self, choice: Choice, *, peak: bool = False) -> Timed:
        """Run warm-up steps, and then timed ones: more of short steps, which are noisier.

        Args:
            choice: the techniques and the precision.
            peak: whether the memory of one more step is measured at the end.

        Raises:
            Exception: any error of the steps.
        """
        settings = {**self.settings, "precision": choice.precision}
        warmup = _TO_PLAN if choice.has_budget else _WARMUP
        watch = _Watch(warmup, peak)
        # The same batch each time, so that the list takes no memory.
        batches = [self.batch] * (warmup + MOST_TIMED + peak)
        run_steps(Steps(self.module, batches, settings), choice.techniques(), watch)
        return Timed(watch.timed, watch.times[0], watch.peak_bytes, watch.trimming)

    def measure_peak(self, choice: Choice) -> float:
        """Return the peak memory of a step in bytes."""
        return float(self.time(choice, peak=True).peak_bytes)


class _Watch(StepClock):
    """Times steps, and notes how much padding was cut off."""

    trimming: TrimSearch | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, MicroBatching):
                self.trimming = callback.trimming
        super().on_train_start(trainer, pl_module)


@dataclass
class Costs:
    """Measured times, in ms per step.

    Attributes:
        whole: time of an unsplit batch.
        per_part: time that each micro-batch adds.
        factors: (axis, word) → measured factor of a technique on the time of a step.
        predicted: the same, as predicted; used where none was measured.
        compile_ms: time of compilation, once per run.
        left: number of micro-batches → share of the tokens that run, if padding is cut off.
    """

    whole: float = 1.0
    per_part: float = PER_PART
    factors: dict[Switched, float] = field(default_factory=dict)
    predicted: dict[Switched, float] = field(default_factory=dict)
    compile_ms: float = 0.0
    left: dict[int, float] = field(default_factory=dict)

    def assume(self, parts: int, ms: float) -> None:
        """Set the times from that of one number of micro-batches, of which each is assumed to add a small share."""
        self.per_part = ms * PER_PART
        self.whole = (ms - self.per_part * parts) / self.share_of(parts)

    def learn(self, parts: int, ms: float, other_parts: int, other_ms: float) -> None:
        """Derive the times from those of two numbers of micro-batches: ms = share × whole + parts × per_part."""
        share, other_share = self.share_of(parts), self.share_of(other_parts)
        added = (other_ms * share - ms * other_share) / (other_parts * share - parts * other_share)
        self.per_part = max(0.0, added)
        self.whole = (ms - self.per_part * parts) / share

    def note_compilation(self, timed: Timed) -> None:
        """Set the time of compilation from the first way to compile; others find its results in the cache."""
        if not any(axis == "compile" for axis, _ in self.factors):
            self.compile_ms = max(0.0, timed.first_ms - timed.ms)  # the first step compiles

    def share_of(self, parts: int) -> float:
        """Return the share of the tokens that run in ``parts`` micro-batches."""
        return self.left.get(parts, 1.0)

    def estimate(self, choice: Choice, steps: int) -> float:
        """Return the time of a step with its share of the compilation, for a run of ``steps``."""
        ms = (self.whole * self.share_of(choice.parts) + self.per_part * choice.parts) * self.factor(choice)
        return ms + (self.compile_ms / steps if choice.compile else 0.0)

    def least_to_measure_s(self) -> float:
        """Return about how long the fewest useful measurements take: of the plain step, and of the best choice."""
        return _RUNS * (_START_S + (_WARMUP + FEWEST_TIMED) * self.whole / 1e3)

    def factor(self, choice: Choice) -> float:
        """Return the product of the factors of all techniques of a choice."""
        factor = 1.0
        for axis, word in choice.words:
            factor *= self.factor_of(axis, word)
        return factor

    def factor_of(self, axis: str, word: str | Budget) -> float:
        """Return the factor of a technique: measured, else predicted, else assumed."""
        switched = axis, word
        if switched in self.factors:
            return self.factors[switched]
        return self.predicted[switched] if switched in self.predicted else assume_factor(axis, word)

    def describe_source(self, switched: Switched | tuple[()]) -> str:
        """Return what a sentence about the gain of a technique ends with; "" of one that was measured."""
        if not switched or switched in self.factors:
            return ""
        return ", as is predicted" if switched in self.predicted else ", as is assumed"


def assume_costs(module: L.LightningModule, batch: object, device: str, precision: str | None) -> Costs:
    """Assume that a step takes as long as its matrix products at the speed of a large one, which is the least.

    Args:
        module: the model, of which a copy without values is traced.
        batch: the batch of a step.
        device: type of a device that is here.
        precision: of the step; None for float32.
    """
    speed = peak_flops(torch.device(device), dtype_of(precision))
    whole = 1e3 * count_flops(module, batch) / speed
    return Costs(whole=whole, per_part=PER_PART * whole, compile_ms=_COMPILE_MS)


def assume_factor(axis: str, word: str | Budget) -> float:
    if axis == "precision":
        return _BF16
    return switch_of(axis, word).setting.cost
