"""Log the peak memory of a step."""

import math
from typing import ClassVar

import lightning as L
import torch
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_fasttrain.core.checks import NonNegativeInt
from lightning_fasttrain.core.host.lightning import accumulation_continues, is_time_to_log, log_to_all
from lightning_fasttrain.core.messages import explain, note_once, say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.core.peak_memory import COUNTED, PeakMemory
from lightning_fasttrain.technique import Technique


class MemoryWindow(Technique):
    """Base class of techniques that look at memory in complete optimizer steps; opens a window before a step.

    Attributes:
        profiled: kinds of devices on which the window needs torch's only profiler.
        first_step: number of steps before the window.
    """

    bitwise: ClassVar[bool] = True
    predicted: ClassVar[bool] = True
    profiled: ClassVar[tuple[str, ...]] = ("cpu",)
    first_step: int
    _open: object = None

    def _open_window(self, trainer: L.Trainer, module: L.LightningModule, batch: object) -> None:
        """Begin to measure; the batch is on the device, and the forward comes next."""
        raise NotImplementedError

    def _end_step(self, trainer: L.Trainer) -> None:
        """End a step; there may be no window."""
        raise NotImplementedError

    def _leave(self) -> None:
        """End with the run, which may have failed."""
        raise NotImplementedError

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self._step, self._in_step = -1, False
        self._due: float = self.first_step
        device = trainer.strategy.root_device.type
        profiler = getattr(trainer.profiler, "inner", trainer.profiler)  # StepMeter may wrap it
        if device not in COUNTED:
            self._give_up(f"memory cannot be measured on {device}", "Train on the CPU or on CUDA")
        elif device in self.profiled and isinstance(profiler, PyTorchProfiler):
            self._give_up("torch runs one profiler at a time", "Remove Trainer(profiler=PyTorchProfiler())")
        return self._leave

    def _give_up(self, why: str, way_out: str) -> None:
        self._due = math.inf
        warn(explain(f"{type(self).__name__} measures nothing", why, way_out))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is on the device, and the forward comes next."""
        if self._in_step:
            return
        self._in_step, self._step = True, self._step + 1
        if self._step < self._due or self._open is not None:
            return
        # Two meters of this package may need the only profiler in the same step.
        if trainer.strategy.root_device.type in self.profiled and torch.autograd._profiler_enabled():
            name = type(self).__name__
            note_once(f"{name}: another torch profiler is active, and torch runs one at a time; waiting")
            return
        self._open_window(trainer, pl_module, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped, or the step continues with another batch."""
        if not accumulation_continues(trainer):
            self._in_step = False
            self._end_step(trainer)


class MemoryMeter(MemoryWindow):
    """Measures the peak memory of training steps; see :class:`PeakMemory`.

    Acts between ``on_train_batch_start`` of a step's first batch and ``on_train_batch_end`` of its last, so that the
    forward, the gradients that exist during it, and the optimizer are included. On CUDA every step is measured. On the
    CPU a measured step is slow, so by default only one early step is; its baseline is the model, its gradients, the
    optimizer state and the batch. The result is ``peak_bytes``, and is logged as ``memory_meter/peak_mib``: the
    largest so far, of this process.

    Args:
        every_n_steps: on the CPU, number of steps between measurements; 0 for a single one.
        warmup: number of initial steps that are not measured, since optimizer state and compiled code do not exist yet.

    Attributes:
        peak_bytes: measured peak in bytes; None until a step has been measured.

    Raises:
        TypeError, ValueError: an argument is not an integer of at least 0.

    Example:
        >>> meter = MemoryMeter()
        >>> meter.peak_bytes  # bytes, after `Trainer(callbacks=[meter]).fit(model)`

    Source:
        Ours; Lightning's ``DeviceStatsMonitor`` logs CUDA's counters, and on the CPU those of the whole machine.
    """

    effect: ClassVar[str] = "peak memory of a step"
    when: ClassVar[str] = "you want to know what fits"
    in_a_loop: ClassVar[str] = "profiling.PeakMemory(device, model, optimizer)"

    def __init__(self, every_n_steps: NonNegativeInt = 0, warmup: NonNegativeInt = 2) -> None:
        self.every_n_steps = every_n_steps
        self.warmup = self.first_step = warmup
        self.peak_bytes: int | None = None
        self._open: PeakMemory | None = None

    def measurements(self) -> dict[str, float]:
        if self.peak_bytes is None:
            return {}
        return {"peak_bytes": self.peak_bytes}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: nothing of this run has been measured."""
        self.peak_bytes = None

    def _open_window(self, trainer: L.Trainer, module: L.LightningModule, batch: object) -> None:
        # Held until on_train_batch_end, so `with` cannot be used.
        self._open = PeakMemory(trainer.strategy.root_device, module, trainer.optimizers, batch).__enter__()

    def _end_step(self, trainer: L.Trainer) -> None:
        peak = self._leave()
        if peak is None:
            return
        self.peak_bytes = max(self.peak_bytes or 0, peak.peak_bytes)
        on_cpu = peak.device.type == "cpu"
        if on_cpu:
            self._due = self._step + self.every_n_steps if self.every_n_steps else math.inf
        if on_cpu or is_time_to_log(trainer):
            log_to_all(trainer, {"memory_meter/peak_mib": self.peak_bytes / 2**20})

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: validation during accumulation does not belong to the step; the next complete step is measured."""
        self._leave()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: report if the fit was too short."""
        if self.peak_bytes is None and self._due < math.inf:
            why = "the fit ended within the first %d steps, or another torch profiler was active all the time"
            say(f"MemoryMeter: nothing was measured: {why}", self.warmup)

    def _leave(self) -> PeakMemory | None:
        """End the measurement, if there is one, and return it."""
        peak, self._open = self._open, None
        if peak is not None:
            peak.__exit__()
        return peak
