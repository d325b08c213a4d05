"""Measure a few steps of a model on this machine: their time, and their memory by category."""

from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
import torch

from lightning_fasttrain.core.device import device_clock, dtype_of, peak_flops
from lightning_fasttrain.profiling import MemoryRecording
from lightning_fasttrain.proof.verification.short_run import EnoughError, Steps, run_steps
from lightning_fasttrain.technique import Technique

_WARMUP = 4  # steps: techniques such as a memory budget measure and plan in the first three
_LEAST, _MOST, _SECONDS = 2, 12, 0.5  # steps that are timed: as many as that takes, between the two


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of a step on this machine.

    Attributes:
        device: type of the device.
        ms: time of a step, the fastest, since other work of the machine only adds time.
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


def measure_step(
    module: L.LightningModule, batch: object, precision: str, techniques: Sequence[Technique] = ()
) -> MeasuredStep:
    """Run a few steps on a copy of a module on this machine's device.

    Args:
        module: the model, which is not changed.
        batch: the batch of each step.
        precision: of the Trainer.
        techniques: those of the run.

    Raises:
        Exception: any error of the steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"accelerator": device, "precision": precision}
    watch = _Watch()
    # The same batch each time, so that the list takes no memory.
    run_steps(Steps(module, [batch] * (_WARMUP + _MOST + 1), settings), techniques, watch)
    peak = peak_flops(torch.device(device), dtype_of(precision))
    return MeasuredStep(device, min(watch.timed), len(watch.timed), peak, watch.peak_bytes, watch.activation_bytes)


class _Watch(L.Callback):
    """Times steps, and records the memory of one more by category."""

    def __init__(self) -> None:
        self.peak_bytes = self.activation_bytes = 0
        self._times: list[float] = []
        self._since = 0.0
        self._recording: MemoryRecording | None = None

    @property
    def timed(self) -> list[float]:
        """The time of each step after the warm-up, in ms."""
        return self._times[_WARMUP:]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = device_clock(pl_module.device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        enough = len(self.timed) >= _LEAST and sum(self.timed) >= 1e3 * _SECONDS
        # Only when all times are there: recording slows a step down.
        if enough or len(self.timed) >= _MOST:
            self._recording = MemoryRecording(pl_module, trainer.optimizers, batch).__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        now = device_clock(pl_module.device)
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)
            assert recording.record is not None
            self.peak_bytes = recording.record.peak_bytes
            self.activation_bytes = recording.record.peaks["activations"]
            raise EnoughError
        self._times.append(1e3 * (now - self._since))
        self._since = now

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: torch's profiler runs once in a process, so a step that failed must end it."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
