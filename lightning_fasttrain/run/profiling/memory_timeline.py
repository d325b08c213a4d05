"""Timeline of the memory of a training step, by purpose."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.messages import explain, format_bytes, note_once, say, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.run.profiling.memory_files import check_kinds
from lightning_fasttrain.run.profiling.memory_record import MemoryRecord
from lightning_fasttrain.run.profiling.memory_recording import MemoryRecording
from lightning_fasttrain.technique import Technique


class MemoryTimeline(Technique):
    """Records a few steps, and writes what their memory was used for; see :class:`MemoryRecording`.

    Acts between ``on_train_batch_start`` of the first recorded step and ``on_train_batch_end`` of the last; before
    and after, nothing is attached and there is no cost. The steps are consecutive: validation after a step ends the
    recording, and validation during a step restarts it. With several processes each writes to its own folder,
    ``rank0`` and so on. If memory runs out in a recorded step, the files are written and the error names the largest
    holders.

    Args:
        folder: folder of the files, ``memory_timeline.html`` and so on.
        first_step: number of steps before the recording, which create optimizer state and compiled code. On the CPU,
            torch's only profiler is shared with ``MemoryMeter``, which by default is done by then.
        steps: number of steps to record.
        kinds: kinds of files, as in :func:`~lightning_fasttrain.run.save_memory_record`.

    Attributes:
        record: a :class:`~lightning_fasttrain.run.MemoryRecord`; None until the recording has ended.

    Raises:
        TypeError, ValueError: ``first_step`` is not an integer of at least 0, ``steps`` is not an integer of at least
            1, or a kind is unknown.
        ModuleNotFoundError: "png" without matplotlib.

    Example:
        >>> timeline = MemoryTimeline("memory", first_step=10, steps=1)
        >>> timeline.record  # after `Trainer(callbacks=[timeline]).fit(model)`: print it for a table

    Source:
        See :class:`~lightning_fasttrain.run.MemoryRecording`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a picture of memory over time by category, with the op and module at the peak"
    when: ClassVar[str] = "you want to know what memory is used for, and when"
    in_a_loop: ClassVar[str] = "run.MemoryRecording(model, optimizer, batch)"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        first_step: int = 3,
        steps: int = 2,
        kinds: Sequence[str] = ("html", "json"),
    ) -> None:
        check_kinds(kinds)
        self.folder, self.kinds = Path(folder), tuple(kinds)
        self.first_step = positive_int("first_step", first_step) if first_step != 0 else 0
        self.steps = positive_int("steps", steps)
        self.record: MemoryRecord | None = None
        self._open: MemoryRecording | None = None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        self.record, self._step, self._in_step, self._whole_steps = None, -1, False, 0
        self._due: float = self.first_step
        device = trainer.strategy.root_device.type
        if device not in ("cpu", "cuda"):
            self._give_up(f"memory cannot be recorded on {device}", "Train on the CPU or on CUDA")
        # StepMeter may wrap it.
        elif isinstance(getattr(trainer.profiler, "inner", trainer.profiler), PyTorchProfiler):
            self._give_up("torch runs one profiler at a time", "Remove Trainer(profiler=PyTorchProfiler())")
        return self._end_with_the_run

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the batch is on the device, and the forward comes next."""
        begins, self._in_step = not self._in_step, True
        self._step += begins
        if self._open is not None:
            (self._open.next_step if begins else self._open.see_batch)(batch)
        elif begins and self._step >= self._due:
            # Two meters of this package may need the only profiler in the same step.
            if torch.autograd._profiler_enabled():
                note_once("MemoryTimeline: another torch profiler is active, and torch runs one at a time; waiting")
                return
            folder = self.folder if trainer.world_size == 1 else self.folder / f"rank{trainer.global_rank}"
            recording = MemoryRecording(pl_module, trainer.optimizers, batch, save_to=folder, kinds=self.kinds)
            self._open = recording.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the optimizer has stepped, or the step continues with another batch."""
        if accumulation_continues(trainer):
            return
        self._in_step = False
        if self._open is not None:
            self._whole_steps += 1
            if self._whole_steps == self.steps:
                self._finish()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: validation does not belong to a step."""
        if self._whole_steps and not self._in_step:
            self._finish()
        else:
            self._discard()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: finish with the steps recorded so far, or report that there were none."""
        self.on_validation_start(trainer, pl_module)
        if self.record is None and self._due < math.inf:
            say("MemoryTimeline: nothing was recorded: no complete step came after the first %d", self.first_step)

    def _finish(self) -> None:
        recording, self._open = self._open, None
        if recording is not None:
            recording.__exit__(None, None, None)
            self.record = record = recording.record
            assert record is not None
            self._due = math.inf
            say("MemoryTimeline: peak %s %s; see %s", format_bytes(record.peak_bytes), record.where, self.folder)

    def _discard(self) -> None:
        recording, self._open = self._open, None
        if recording is not None:
            recording.stop()
            self._whole_steps = 0

    def _end_with_the_run(self) -> None:
        error = sys.exception()  # Lightning undoes a failed run while it handles the error
        recording = self._open
        if recording is None or error is None:
            self._discard()
        else:
            self._open = None
            recording.__exit__(type(error), error, error.__traceback__)
            self.record = recording.record

    def _give_up(self, why: str, way_out: str) -> None:
        self._due = math.inf
        warn(explain("MemoryTimeline records nothing", why, way_out))
