"""Timeline of the memory of a training step, by purpose."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import lightning as L

from lightning_fasttrain.core.atomic_write import refuse_unwritable
from lightning_fasttrain.core.checks import NonNegativeInt, PositiveInt
from lightning_fasttrain.core.messages import format_bytes, say
from lightning_fasttrain.profiling.memory_meter import MemoryWindow
from lightning_fasttrain.profiling.memory_record import MemoryRecord, check_kinds
from lightning_fasttrain.profiling.memory_recording import MemoryRecording


class MemoryTimeline(MemoryWindow):
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
        kinds: kinds of files, as in :func:`~lightning_fasttrain.profiling.save_memory_record`.

    Attributes:
        record: a :class:`~lightning_fasttrain.profiling.MemoryRecord`; None until the recording has ended.

    Raises:
        TypeError, ValueError: ``first_step`` is not an integer of at least 0, ``steps`` is not an integer of at least
            1, or a kind is unknown.
        OSError: in ``fit``, before the first step: no file can be created in ``folder``.
        ModuleNotFoundError: "png" without matplotlib.

    Example:
        >>> timeline = MemoryTimeline("memory", first_step=10, steps=1)
        >>> timeline.record  # after `Trainer(callbacks=[timeline]).fit(model)`: print it for a table

    Source:
        See :class:`~lightning_fasttrain.profiling.MemoryRecording`.
    """

    effect: ClassVar[str] = "a picture of memory over time by category, with the op and module at the peak"
    when: ClassVar[str] = "you want to know what memory is used for, and when"
    in_a_loop: ClassVar[str] = "profiling.MemoryRecording(model, optimizer, batch)"
    profiled: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(
        self,
        folder: str | os.PathLike[str],
        first_step: NonNegativeInt = 3,
        steps: PositiveInt = 2,
        kinds: Sequence[str] = ("html", "json"),
    ) -> None:
        check_kinds(kinds)
        self.folder, self.kinds = Path(folder), tuple(kinds)
        self.first_step = first_step
        self.steps = steps
        self.record: MemoryRecord | None = None
        self._open: MemoryRecording | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: nothing of this run has been recorded."""
        refuse_unwritable(self.folder, f"MemoryTimeline(folder={str(self.folder)!r})")
        self.record, self._whole_steps = None, 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is on the device, and the forward comes next."""
        if self._open is not None:
            (self._open.see_batch if self._in_step else self._open.next_step)(batch)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _open_window(self, trainer: L.Trainer, module: L.LightningModule, batch: object) -> None:
        folder = self.folder if trainer.world_size == 1 else self.folder / f"rank{trainer.global_rank}"
        recording = MemoryRecording(module, trainer.optimizers, batch, save_to=folder, kinds=self.kinds)
        self._open = recording.__enter__()

    def _end_step(self, trainer: L.Trainer) -> None:
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

    def _leave(self) -> None:
        # Lightning undoes a failed run while it handles the error.
        error = sys.exception()
        recording = self._open
        if recording is None or error is None:
            self._discard()
        else:
            self._open = None
            recording.__exit__(type(error), error, error.__traceback__)
            self.record = recording.record
