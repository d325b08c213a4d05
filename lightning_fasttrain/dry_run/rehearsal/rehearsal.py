"""The first minute tells what the tenth hour would."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fasttrain.core.device import return_unused_memory
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.dry_run.rehearsal.context import Rehearsed, find_window, read_batches
from lightning_fasttrain.dry_run.rehearsal.disk_space import find_places, refuse_bad_folders, temporary_folder
from lightning_fasttrain.dry_run.rehearsal.isolation import leaving_no_trace
from lightning_fasttrain.dry_run.rehearsal.nested_trainer import find_unrehearsable
from lightning_fasttrain.dry_run.rehearsal.rehearsal_report import RehearsalError, RehearsalReport
from lightning_fasttrain.dry_run.rehearsal.resume_stage import go_on_from_checkpoint
from lightning_fasttrain.dry_run.rehearsal.run_copy import RunCopy, copy_run
from lightning_fasttrain.dry_run.rehearsal.stages import (
    describe_saving,
    run_in_small,
    run_largest,
    verify_techniques,
    weigh_checkpoint,
    with_exact_resume,
)
from lightning_fasttrain.technique.technique import Onlooker

_SHARE = 0.25  # of the time, for batches that are only read


def rehearse(trainer: L.Trainer, run: RunCopy, seconds: float = 60.0) -> RehearsalReport:
    """Rehearse a run that is about to take its first step.

    Args:
        trainer: in ``on_train_start``.
        run: a copy of what it is made of, taken in ``setup``.
        seconds: see :class:`Rehearsal`.

    Raises:
        RehearsalError: it would fail later.
    """
    report, began = RehearsalReport(notes=list(run.notes)), time.monotonic()
    why = find_unrehearsable(trainer)
    with Rehearsing(), leaving_no_trace(trainer, trainer.lightning_module), _as_rehearsal_error():
        refuse_bad_folders(trainer)
        if why is None:
            run.share_equal_weights(trainer.lightning_module)
            return_unused_memory()
            _go_through(trainer, run, seconds, report)
        else:
            report.tell("step", f"not rehearsed: {why}; folders of checkpoints can be written to and have room for two")
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
        whole = run_in_small(on, saving)
        weigh_checkpoint(on, saving)
        go_on_from_checkpoint(on, saving, whole)
        run_largest(on)
        trainer.strategy.barrier()  # nobody reads from the folder any more


class Rehearsing:
    """Notes that a rehearsal goes on in this process, for who would add one to every Trainer."""

    depth: ClassVar[int] = 0

    def __enter__(self) -> None:
        Rehearsing.depth += 1

    def __exit__(self, *_: object) -> None:
        Rehearsing.depth -= 1


def is_rehearsing() -> bool:
    """Whether a rehearsal goes on in this process."""
    return Rehearsing.depth > 0


@contextmanager
def _as_rehearsal_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a folder, or the room in it: said already as errors are
        raise RehearsalError(str(error)) from error


class Rehearsal(Onlooker):
    """Rehearse the run in its first minute, and leave no trace: what would fail in hour ten is told now.

    Copies of module and callbacks run in a Trainer of their own, with the run's precision, accumulation, clipping,
    checkpoint plugin and, under DDP, on all its ranks; on a GPU the run's own weights wait in host memory meanwhile:

    - ``verify``: the techniques are the same training on the first two batches, and in validation;
    - a window of ``accumulate_grad_batches``, a short one, a batch of each validation loader, the end of an epoch, and
      the first step of the next; what ModelCheckpoint and EarlyStopping monitor is logged; the step's predicted peak,
      which the block that the fit begins with tells beside what is free;
    - a checkpoint, with what the run's ModelCheckpoints put into it, written to their disk and removed again: its size,
      its seconds, and room for all that the run will keep;
    - a new model loads it, holds what was saved, and its next step is the uninterrupted run's, bit for bit (or within
      the rounding by which two equal steps differ on this device);
    - the largest batch of a sample, after a step, so that the optimizer's state is there.

    Each is one line on rank zero, when it is done, and in ``report``. Nothing stays in the way of training.

    Acts in ``on_train_start``, when optimizers are there and a checkpoint is restored; copies are taken in ``setup``,
    before any technique acts, so they begin with the weights that the module was made with. It comes first whatever its
    place in the list. A ``LambdaCallback``, and what cannot be copied, is left out, which ``report.notes`` says.
    Loggers are replaced by one that takes every call and does nothing. ``prepare_data``, ``on_train_end`` and your
    callbacks' ``on_exception`` are not called; files that module or callbacks write within an epoch are written.

    Under strategies that shard no copy can be run beside: only folders and room are asked about, which is said.

    Args:
        seconds: about how long it should take: reading batches for the largest takes a quarter of it at most.
        without: classes of callbacks that are not to act in it, such as one that sends messages.

    Raises:
        RehearsalError: in ``fit``, on all ranks.

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
        Ours; Lightning's ``fast_dev_run`` and its sanity check of validation run some of this, without a checkpoint.
    """

    def __init__(self, seconds: float = 60.0, without: tuple[type[L.Callback], ...] = ()) -> None:
        if not seconds >= 0:
            raise ValueError(explain(f"seconds={seconds}", "it is a time", "Use seconds=60"))
        self.seconds, self.without = seconds, tuple(without)
        self.report: RehearsalReport | None = None
        self._run: RunCopy | None = None

    @property
    def predicted_bytes(self) -> int | None:
        """The peak of a step on this rank, which the block that a fit begins with tells."""
        return None if self.report is None else self.report.predicted_bytes

    def look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Both the first technique and Lightning's setup call it, and a validation alone is not rehearsed.
        if trainer.state.fn != TrainerFn.FITTING or self.report is not None or self._run is not None:
            return
        try:
            self._run = copy_run(trainer, pl_module, self.without)
        except TypeError as error:
            raise RehearsalError(str(error)) from error

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the last before the first batch. Once: a second ``fit`` is not rehearsed again."""
        run, self._run = self._run, None
        if run is not None:
            self.report = rehearse(trainer, run, self.seconds)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: what a failed run leaves."""
        self._run = None
