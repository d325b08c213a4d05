"""End a run that hangs, and name the rank that all others wait for, with its stack."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fasttrain.core.checks import PositiveFloat
from lightning_fasttrain.core.host.lightning import started_processes, surround_teardown
from lightning_fasttrain.core.messages import write_to_stderr
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.guards.watchdog import ProgressWatch, check_times
from lightning_fasttrain.technique import Technique


class HangWatch(Technique):
    """End a run that hangs, name the rank that the others wait for, and show its stack; see :class:`ProgressWatch`.

    Acts at the hooks in which a batch begins, its backward, the optimizer step and the end of the batch, in evaluation,
    and when a checkpoint is saved: each is a sign of life. Long validation is therefore not a hang; a single batch, or
    a wait for data, of more than ``timeout_s`` is one, and so is a save of more than ``first_timeout_s``.

    If Lightning or torchrun launched this process as a rank, it ends when its launcher does; Lightning's main process
    ends its children. When one of several ranks fails, its error is shown at once, before other exception handlers can
    wait for the other ranks, and the time limit also holds for that wait.

    Args:
        timeout_s, first_timeout_s, folder: as in :class:`ProgressWatch`.

    Raises:
        ValueError: a time is not positive.

    Example:
        >>> watch = HangWatch(timeout_s=300)

    Source:
        See :class:`ProgressWatch`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a run that hangs ends, and the rank that hangs is named with its stack"
    when: ClassVar[str] = "a run has several processes, or is unattended for hours"
    in_a_loop: ClassVar[str] = "guards.ProgressWatch(timeout_s).beat(phase)"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        timeout_s: PositiveFloat = 600.0,
        first_timeout_s: PositiveFloat | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.timeout_s, self.first_timeout_s = check_times(timeout_s, first_timeout_s)
        self.folder = folder
        self._watch: ProgressWatch | None = None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        children = started_processes(trainer.strategy)
        is_child = children is not None and trainer.local_rank > 0
        parent_rank = trainer.global_rank - trainer.local_rank if is_child else None
        launched = parent_rank is not None or "TORCHELASTIC_RUN_ID" in os.environ
        parent = os.getppid() if launched else None
        watch = ProgressWatch(self.timeout_s, self.first_timeout_s, self.folder, children or (), parent, parent_rank)
        self._watch = watch.__enter__()
        if watch.parent is not None:
            # A process that is stopped, or holds Python's lock, would not handle another signal.
            _die_with_parent(signal.SIGKILL)

        def leave() -> None:
            # A failed rank is watched until the end of its teardown.
            if trainer.state.status == TrainerStatus.INTERRUPTED and trainer.world_size > 1:
                self._watch_the_end(trainer, watch)
                return
            _outlive_parent(watch)
            self._watch = None
            watch.__exit__()

        return leave

    def _watch_the_end(self, trainer: L.Trainer, watch: ProgressWatch) -> None:
        """Keep watching the teardown, in which other exception handlers may wait for ranks that wait for this one."""
        watch.fail(sys.exception() or RuntimeError("unknown"))

        def end_watch(teardown: Callable[[], None]) -> None:
            try:
                teardown()
            finally:
                self._watch = None
                watch.__exit__()

        surround_teardown(trainer, end_watch)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: show the error before any rank can be made to wait."""
        # If the watch is ending the run, this error is only a consequence.
        ending = self._watch is not None and self._watch.ending
        # KeyboardInterrupt and SystemExit are not failures.
        if trainer.world_size > 1 and isinstance(exception, Exception) and not ending:
            write_to_stderr(f"rank {trainer.global_rank} failed:\n{''.join(traceback.format_exception(exception))}")
        super().on_exception(trainer, pl_module, exception)

    def _beat(self, phase: str) -> None:
        if self._watch is not None:
            self._watch.beat(phase)

    def on_train_batch_start(self, *_: object) -> None:
        """Hook, like all that follow: send a sign of life."""
        if self._watch is not None:
            self._watch.begin_step()

    def on_before_backward(self, *_: object) -> None:
        self._beat("backward")

    def on_before_optimizer_step(self, *_: object) -> None:
        self._beat("optimizer step")

    def on_train_batch_end(self, *_: object) -> None:
        self._beat("next batch")

    def on_validation_batch_start(self, *_: object) -> None:
        self._beat("evaluation")

    def on_validation_end(self, *_: object) -> None:
        self._beat("after evaluation")

    def on_save_checkpoint(self, *_: object) -> None:
        self._beat("checkpoint")

    def on_train_end(self, *_: object) -> None:
        """Hook: from here on a rank may continue after the others have ended."""
        self._beat("end of training")
        if self._watch is not None:
            _outlive_parent(self._watch)

    def on_test_batch_start(self, *_: object) -> None:
        self._beat("evaluation")

    def on_predict_batch_start(self, *_: object) -> None:
        self._beat("prediction")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_watch": None}  # a thread cannot be copied


def _outlive_parent(watch: ProgressWatch) -> None:
    if watch.parent is not None:
        watch.parent = None
        _die_with_parent(0)


def _die_with_parent(number: int) -> None:
    """Have Linux end this process with its launcher, even if stopped; elsewhere the watching thread does it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            # 1 is PR_SET_PDEATHSIG, and the signal 0 cancels it.
            ctypes.CDLL(None).prctl(1, number)
