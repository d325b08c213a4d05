"""Rehearse a run: try in its first minute what would happen in later hours."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fasttrain.core.checks import NonNegativeFloat, check_arguments
from lightning_fasttrain.core.device import return_unused_memory
from lightning_fasttrain.proof.rehearsal.context import (
    RehearsalError,
    RehearsalReport,
    Rehearsed,
    find_window,
    read_batches,
)
from lightning_fasttrain.proof.rehearsal.disk_space import find_places, refuse_bad_folders, temporary_folder
from lightning_fasttrain.proof.rehearsal.run_copy import RunCopy, copy_run, find_unrehearsable, leaving_no_trace
from lightning_fasttrain.proof.rehearsal.stages import (
    describe_saving,
    measure_checkpoint,
    resume_from_checkpoint,
    run_largest,
    run_small,
    verify_techniques,
    with_exact_resume,
)
from lightning_fasttrain.technique.technique import EarlyObserver, needs_an_object

_SHARE = 0.25  # of the time, for batches that are read but not run


def rehearse(
    trainer: L.Trainer, run: RunCopy, seconds: float = 60.0, kind: type[RehearsalReport] = RehearsalReport
) -> RehearsalReport:
    """Rehearse a run that is about to take its first step.

    Args:
        trainer: the Trainer, in ``on_train_start``.
        run: a copy of the run, taken in ``setup``.
        seconds: see :class:`Rehearsal`.
        kind: class of the report, which also decides how each stage is announced.

    Raises:
        RehearsalError: the run would fail later.
    """
    report, began = kind(notes=list(run.notes)), time.monotonic()
    why = find_unrehearsable(trainer)
    with Rehearsing(), leaving_no_trace(trainer, trainer.lightning_module), _as_rehearsal_error():
        refuse_bad_folders(trainer)
        if why is None:
            run.share_equal_weights(trainer.lightning_module)
            return_unused_memory()
            _go_through(trainer, run, seconds, report)
        else:
            report.tell("step", f"not rehearsed: {why}; folders of checkpoints are writable and have space for two")
    report.seconds = time.monotonic() - began
    return report


def _go_through(trainer: L.Trainer, run: RunCopy, seconds: float, report: RehearsalReport) -> None:
    window, places = find_window(trainer, run), find_places(trainer)
    sample, validation = read_batches(trainer, window, _SHARE * seconds)
    with temporary_folder(trainer, places) as folder:
        on = Rehearsed(trainer, run, sample, validation, window, places, folder, report)
        verify_techniques(on, str(trainer.precision))
        on = replace(on, run=with_exact_resume(run))
        saving = describe_saving(trainer, folder)
        whole = run_small(on, saving)
        measure_checkpoint(on, saving)
        resume_from_checkpoint(on, saving, whole)
        run_largest(on)
        # The folder is removed next, so no rank may still read from it.
        trainer.strategy.barrier()


class Rehearsing:
    """Marks that a rehearsal runs in this process, for code that would add one to every Trainer."""

    depth: ClassVar[int] = 0

    def __enter__(self) -> None:
        Rehearsing.depth += 1

    def __exit__(self, *_: object) -> None:
        Rehearsing.depth -= 1


def is_rehearsing() -> bool:
    """Whether a rehearsal runs in this process."""
    return Rehearsing.depth > 0


@contextmanager
def _as_rehearsal_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # about a folder or its free space: already in the form of our errors
        raise RehearsalError(str(error)) from error


@check_arguments
class Rehearsal(EarlyObserver):
    """Rehearse the run in its first minute, without side effects, and report errors that would appear hours later.

    Copies of the module and callbacks run in a separate Trainer, with the run's precision, accumulation, clipping,
    checkpoint plugin and, under DDP, on all its ranks; on a GPU the run's own weights are in host memory meanwhile:

    - ``verify``: training with the techniques is the same on the first two batches, and in validation;
    - a window of ``accumulate_grad_batches``, a short one, a batch of each validation loader, the end of an epoch, and
      the first step of the next; ModelCheckpoint and EarlyStopping must monitor logged values; the predicted peak of
      the step is reported;
    - a checkpoint, with the contents that the run's ModelCheckpoints save, written to their disk and removed again:
      its size, its seconds, and space for all checkpoints that the run will keep;
    - a new model loads it, has the saved state, and its next step is the uninterrupted run's, bit for bit (or within
      the rounding by which two equal steps differ on this device);
    - the largest batch of a sample, after a step, so that optimizer state exists.

    Each is reported in one line on rank 0, and in ``report``. Training is not affected.

    Acts in ``on_train_start``, when optimizers exist and a checkpoint is restored; copies are made in ``setup``, before
    any technique acts, so they start with the initial weights of the module. It runs first, whatever its position in
    the list. A ``LambdaCallback``, and objects that cannot be copied, are left out (see ``report.notes``). Loggers are
    replaced by one that does nothing. ``prepare_data``, ``on_train_end`` and your callbacks' ``on_exception`` are not
    called; files that the module or callbacks write within an epoch are written.

    Under sharding strategies a copy cannot be run: only folders and free disk space are checked, with a log line.

    Args:
        seconds: approximate duration; reading batches to find the largest takes at most a quarter of it.
        without: classes of callbacks that must not act in it, such as one that sends messages.

    Raises:
        RehearsalError: in ``fit``, on all ranks, if the run would fail.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> rehearsal = Rehearsal()
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", max_steps=1, callbacks=[rehearsal], logger=False, enable_progress_bar=False,
        ...     enable_model_summary=False, default_root_dir=getfixture("tmp_path"),
        ... )
        >>> trainer.fit(BoringModel())
        >>> list(rehearsal.report.lines)
        ['verify', 'step', 'checkpoint', 'resume', 'largest batch']
        >>> rehearsal.report.resumed_exactly
        True

    Source:
        Ours; Lightning's ``fast_dev_run`` and its sanity check of validation run parts of this, without a checkpoint.
    """

    kind_of_report: ClassVar[type[RehearsalReport]] = RehearsalReport

    def __init__(self, seconds: NonNegativeFloat = 60.0, without: tuple[type[L.Callback], ...] = ()) -> None:
        self.seconds, self.without = seconds, tuple(without)
        self.report: RehearsalReport | None = None
        self._run: RunCopy | None = None

    @property
    def predicted_bytes(self) -> int | None:
        """The peak memory of a step on this rank in bytes, as shown in the report at the start of a fit."""
        return None if self.report is None else self.report.predicted_bytes

    def look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Called by the first technique and by Lightning's setup; a validation alone is not rehearsed.
        if trainer.state.fn != TrainerFn.FITTING or self.report is not None or self._run is not None:
            return
        try:
            self._run = copy_run(trainer, pl_module, self.without)
        except TypeError as error:
            raise RehearsalError(str(error)) from error

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last before the first batch. Runs once: a second ``fit`` is not rehearsed again."""
        run, self._run = self._run, None
        if run is not None:
            self.report = rehearse(trainer, run, self.seconds, self.kind_of_report)

    @needs_an_object
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: clean up after a failed run."""
        self._run = None
