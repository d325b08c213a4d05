"""How long steps really take: a few of them, on a copy, with the techniques of a choice."""

import contextlib
import gc
import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from lightning_fasttrain.plan.proof.step_record import Steps, run_steps
from lightning_fasttrain.planner.choice import Choice
from lightning_fasttrain.run.memory_meter import PeakMemory

_WARMUP = 1


@dataclass
class Timed:
    """What a few steps took.

    Attributes:
        step_ms: of each step after the first.
        first_ms: of the first, in which things are compiled and allocated.
        peak_bytes: of the last step, if it was asked for.
    """

    step_ms: list[float]
    first_ms: float
    peak_bytes: int = 0


class Stopwatch:
    """Times steps on copies of a module.

    Args:
        module: left as it is.
        batch: of each step.
        settings: of the Trainer, such as ``accelerator``.
    """

    def __init__(self, module: L.LightningModule, batch: Any, settings: dict[str, Any]) -> None:
        self.module, self.batch, self.settings = module, batch, settings

    def time(self, choice: Choice, steps: int, *, peak: bool = False) -> Timed:
        """Run some steps and one before them.

        Args:
            choice: how.
            steps: that are timed.
            peak: whether the last is one more, whose memory is measured instead of its time.

        Raises:
            Exception: whatever they raise.
        """
        count = steps + _WARMUP + peak
        settings = {**self.settings, "precision": choice.precision}
        watch = _Watch(count, peak)
        try:
            run_steps(Steps(self.module, [self.batch] * count, settings), choice.techniques(), watch)
        finally:
            gc.collect()  # a trainer and its model know one another
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        times = watch.times[: len(watch.times) - peak]
        return Timed(times[_WARMUP:], times[0], watch.peak_bytes)


class _Watch(L.Callback):
    """Notes when steps begin and end. A step begins where the one before ended, so that loading counts."""

    def __init__(self, steps: int, peak: bool) -> None:
        self.steps, self.peak = steps, peak
        self.times: list[float] = []
        self.peak_bytes = 0
        self.measuring = contextlib.ExitStack()
        self.since = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.since = _now(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.peak and batch_idx == self.steps - 1:
            self.meter = PeakMemory(pl_module.device, pl_module, trainer.optimizers, batch)
            self.measuring.enter_context(self.meter)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = _now(pl_module)
        self.times.append(1e3 * (now - self.since))
        self.since = now
        if batch_idx == self.steps - 1 and self.peak:
            self.measuring.close()
            self.peak_bytes = self.meter.peak_bytes


def _now(module: L.LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
