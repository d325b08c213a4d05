"""Measure a few steps of a model on this machine: their time, and their memory by category."""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from lightning_fasttrain.core.device import dtype_of, peak_flops
from lightning_fasttrain.dry_run.verification.short_run import EnoughError, Steps, run_steps
from lightning_fasttrain.planner.candidates.configuration import Choice
from lightning_fasttrain.planner.timing import Stopwatch
from lightning_fasttrain.run import MemoryRecording

_RECORDED = 2  # the first step in which the optimizer has its state


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of a step on this machine.

    Attributes:
        device: type of the device.
        ms: time of a step, the fastest.
        steps: how many were timed.
        peak_flops: FLOP/s of a large matrix product on that device.
        peak_bytes: peak memory of a step.
        activation_bytes: the most memory of activations.
    """

    device: str
    ms: float
    steps: int
    peak_flops: float
    peak_bytes: int
    activation_bytes: int


def measure_step(module: L.LightningModule, batch: Any, precision: str) -> MeasuredStep:
    """Run a few steps on copies of a module on this machine's device.

    Args:
        module: the model, which is not changed.
        batch: the batch of each step.
        precision: of the Trainer.

    Raises:
        Exception: any error of the steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"accelerator": device}
    timed = Stopwatch(module, batch, settings).time(Choice(precision=precision))
    recorder = _Recorder()
    run_steps(Steps(module, [batch] * (_RECORDED + 1), {**settings, "precision": precision}), [], recorder)
    peak = peak_flops(torch.device(device), dtype_of(precision))
    return MeasuredStep(device, timed.ms, len(timed.step_ms), peak, recorder.peak_bytes, recorder.activation_bytes)


class _Recorder(L.Callback):
    """Records the memory of one step by category."""

    def __init__(self) -> None:
        self.peak_bytes = self.activation_bytes = 0
        self._recording: MemoryRecording | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _RECORDED:
            self._recording = MemoryRecording(pl_module, trainer.optimizers, batch).__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)
            assert recording.record is not None
            self.peak_bytes = recording.record.peak_bytes
            self.activation_bytes = recording.record.peaks["activations"]
            raise EnoughError

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: torch's profiler runs once in a process, so a step that failed must end it."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
