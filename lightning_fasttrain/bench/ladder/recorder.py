"""Record ms per step, peak memory and every loss of one rung, without waiting for the device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fasttrain.dry_run.verification.short_run import PeakObserver

MIB = 2**20


class Recorder(PeakObserver):
    """Watches a training loop that calls :meth:`begin` before each step and :meth:`end` after it.

    As a callback it does so itself. List it last, so that the work of every other callback is inside.

    Steps come in three phases: warm-up; timed, from the beginning of one step to the beginning of the next, so that
    the loader's and the loop's own time count; and memory, after the timed ones, because watching every allocation
    takes time.

    Args:
        device: where the steps run.
        warmup: steps before the clock counts.
        timed: steps on the clock.
        memory: steps whose peak memory is taken; at least one.
        tell: called after each step with its number, its phase and perhaps its loss.
        tell_loss: fetch and report the loss of every step, as a naive loop does; the host then waits for the device.

    Example:
        >>> recorder = Recorder(torch.device("cpu"), warmup=1, timed=2, tell=print)
        >>> recorder.phase(0), recorder.phase(2), recorder.phase(3), recorder.steps
        ('warm-up', 'timed', 'memory', 4)
    """

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        timed: int,
        memory: int = 1,
        tell: Callable[[dict[str, Any]], None] | None = None,
        tell_loss: bool = False,
    ) -> None:
        self.device = device
        self.warmup = warmup
        self.timed = timed
        self.steps = warmup + timed + memory
        self.tell = tell
        self.tell_loss = tell_loss
        self.losses: list[Tensor] = []
        self._stamps: list[Any] = []

    def phase(self, step: int) -> str:
        if step < self.warmup:
            return "warm-up"
        return "timed" if step < self.warmup + self.timed else "memory"

    def begin(self, step: int, *held: Any) -> None:
        """Record the beginning of a step; ``held`` is in memory already: module, optimizer, batch."""
        # One stamp more than timed steps: the last of them ends where the next step begins.
        if self.warmup <= step <= self.warmup + self.timed:
            self._stamps.append(self._stamp())
        if self.phase(step) == "memory":
            self.begin_measuring(self.device, *held)

    def end(self, step: int, loss: Tensor) -> None:
        """Record the end of a step, after its optimizer step."""
        self.end_measuring()
        # Kept as a tensor: to read its value the host would wait for the device.
        self.losses.append(loss.detach())
        message: dict[str, Any] = {"step": step + 1, "steps": self.steps, "phase": self.phase(step)}
        if self.tell_loss:
            message["loss"] = loss.item()
        if self.tell is not None:
            self.tell(message)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook: right before the step."""
        self.begin(batch_idx, pl_module, *trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped and the loss of the step is known."""
        # Lightning makes a dict of whatever training_step returns.
        self.end(batch_idx, outputs["loss"])

    def result(self, tokens_per_step: int) -> dict[str, Any]:
        """Return the measurements as plain JSON, after waiting for the device."""
        times_ms = self._times_ms()
        step_ms = statistics.median(times_ms)
        losses = [float(loss) for loss in self.losses]
        return {
            "step_ms": step_ms,
            "step_ms_all": times_ms,
            "tokens_per_s": tokens_per_step / step_ms * 1000,
            "peak_mib": self.peak_bytes / MIB,
            "loss": losses[-1],
            "losses": losses,
        }

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        # An event lets the device take the time, so the host does not wait.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _times_ms(self) -> list[float]:
        pairs = list(zip(self._stamps, self._stamps[1:], strict=False))
        if self.device.type != "cuda":
            return [(after - before) * 1000 for before, after in pairs]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairs]
