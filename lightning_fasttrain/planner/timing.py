"""Time a few steps on a copy, and estimate the time of choices from such measurements."""

from dataclasses import dataclass, field
from typing import Any

import lightning as L

from lightning_fasttrain.core.device import device_clock
from lightning_fasttrain.dry_run.verification.short_run import EnoughError, PeakObserver, Steps, run_steps
from lightning_fasttrain.planner.candidates.configuration import Budget, Choice, switch_of

PER_PART = 0.01  # share of a step for each micro-batch, until it is measured
_BF16 = 0.5
_WARMUP, _TO_PLAN = 1, 4  # steps that come before: a memory budget measures, plans and checks in the first three
_LEAST, _MOST, _SECONDS = 2, 12, 0.5  # steps that are timed: as many as that takes, between the two


@dataclass
class Timed:
    """Measurements of a few steps.

    Attributes:
        step_ms: of each step after the first.
        first_ms: of the first, in which things are compiled and allocated.
        peak_bytes: of the last step, if it was asked for.
    """

    step_ms: list[float]
    first_ms: float
    peak_bytes: int = 0

    @property
    def ms(self) -> float:
        """The fastest: whatever else a machine does only adds."""
        return min(self.step_ms)


class Stopwatch:
    """Times steps on copies of a module.

    Args:
        module: left as it is.
        batch: of each step.
        settings: of the Trainer, such as ``accelerator``.
    """

    def __init__(self, module: L.LightningModule, batch: Any, settings: dict[str, Any]) -> None:
        self.module, self.batch, self.settings = module, batch, settings

    def time(self, choice: Choice, *, peak: bool = False) -> Timed:
        """Run what comes first, and then steps that are timed: more of short ones, which are noisier.

        Args:
            choice: how.
            peak: whether there is one more at the end, whose memory is measured instead of its time.

        Raises:
            Exception: whatever they raise.
        """
        settings = {**self.settings, "precision": choice.precision}
        warmup = _TO_PLAN if choice.has_budget else _WARMUP
        watch = _Watch(warmup, peak)
        # The same batch each time, so that the list takes no memory.
        batches = [self.batch] * (warmup + _MOST + peak)
        run_steps(Steps(self.module, batches, settings), choice.techniques(), watch)
        return Timed(watch.times[warmup:], watch.times[0], watch.peak_bytes)


class _Watch(PeakObserver):
    """Notes when steps begin and end. A step begins where the one before ended, so that loading counts."""

    def __init__(self, warmup: int, peak: bool) -> None:
        self.warmup, self.peak = warmup, peak
        self.times: list[float] = []
        self.since = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.since = device_clock(pl_module.device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._has_enough():
            # Only when all times are there: measuring memory slows a step down.
            self.begin_measuring(pl_module.device, pl_module, trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = device_clock(pl_module.device)
        if self._meter is not None:
            self.end_measuring()
            raise EnoughError
        self.times.append(1e3 * (now - self.since))
        self.since = now
        if self._has_enough() and not self.peak:
            raise EnoughError

    def _has_enough(self) -> bool:
        timed = self.times[self.warmup :]
        return len(timed) >= _LEAST and (sum(timed) >= 1e3 * _SECONDS or len(timed) >= _MOST)


@dataclass
class Costs:
    """Known times, in ms per step.

    Attributes:
        whole: of a batch in one part.
        per_part: that each part adds.
        factors: (axis, word) → the factor of a switch.
        compile_ms: once.
    """

    whole: float = 1.0
    per_part: float = PER_PART
    factors: dict[tuple[str, str | Budget], float] = field(default_factory=dict)
    compile_ms: float = 0.0

    def estimate(self, choice: Choice, steps: int) -> float:
        """Return the time of a step with its share of the compilation, for a run of ``steps``."""
        ms = (self.whole + self.per_part * choice.parts) * self.factor(choice)
        return ms + (self.compile_ms / steps if choice.compile else 0.0)

    def factor(self, choice: Choice) -> float:
        """Return the product of the factors of everything that is switched on."""
        factor = 1.0
        for axis, word in choice.words:
            factor *= self.factors.get((axis, word), assume_factor(axis, word))
        return factor


def assume_factor(axis: str, word: str | Budget) -> float:
    if axis == "precision":
        return _BF16
    return switch_of(axis, word).setting.cost
