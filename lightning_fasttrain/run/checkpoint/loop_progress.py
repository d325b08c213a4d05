"""Find the position in Lightning's loops at which a checkpoint was taken, and resume from exactly there.

Lightning saves its counters as they are, in the middle of an iteration, and on resuming skips the rest of that
iteration: pending validation, plateau schedules, the end of an epoch; with ``max_steps`` it ends an epoch twice.
Here the rest of the iteration is run.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import lightning as L
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from lightning_fasttrain.core.host.lightning import DataFetcher, is_last_batch_taken
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


class SavePoint(StrEnum):
    """The part of a training iteration that was finished when the checkpoint was saved."""

    BATCH = "batch"  # the batch is trained; what follows a batch, such as validation, is not done
    VALIDATION = "validation"  # the batch is trained and validation is done
    ITERATION = "iteration"  # everything that follows a batch is done, and the next batch has not begun
    EPOCH = "epoch"  # an epoch is done, and the next has not begun
    WITHIN = "within"  # inside a batch, as after an exception: the batch is started again


def find_save_point(trainer: L.Trainer) -> SavePoint:
    """Return the current position of ``trainer`` in its iteration."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    validation = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    # Lightning counts `processed` before the hooks at the end of an epoch, in which checkpoints are saved, run.
    if epochs.started == epochs.processed:
        return SavePoint.EPOCH
    if trainer.validating:
        done = validation.is_last_batch and validation.current.ready == validation.current.completed
        if done:
            return SavePoint.VALIDATION
        return SavePoint.BATCH
    # `completed` is counted after on_train_batch_end, in which checkpoints are saved.
    if batches.ready == batches.processed == batches.completed + 1:
        return SavePoint.BATCH
    if batches.ready == batches.processed == batches.completed:
        return SavePoint.ITERATION
    return SavePoint.WITHIN


def list_left_out(trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return a warning if the run stopped within an epoch, whose other batches it will never train on."""
    loops = checkpoint["loops"]["fit_loop"]
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    ended = epochs["started"] == epochs["processed"] > 0
    is_done = 0 <= trainer.max_steps <= checkpoint["global_step"]
    if not ended or batches["is_last_batch"] or is_done:
        return []
    trained = batches["current"]["processed"]
    what = f"the checkpoint was saved after training had stopped after {trained} batches of an epoch"
    why = "Lightning ends an epoch where it stops, so this run begins the next one and leaves out the other batches"
    return [explain(what, why, "Resume from a checkpoint that was saved during training, every_n_train_steps")]


def complete_batch_(checkpoint: dict[str, Any]) -> None:
    """Count the batch after which a checkpoint was taken as completed.

    Otherwise Lightning repeats it or, at the end of an epoch, skips the rest of the epoch's work."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]


def resume_after_batch(trainer: L.Trainer, point: SavePoint, restore: Callable[[], None]) -> Undo:
    """Make the first iteration of the resumed epoch the rest of the one in which the checkpoint was taken.

    ``restore`` is called first in that iteration, after everything that Lightning does before it.
    """
    loop = trainer.fit_loop.epoch_loop
    # Otherwise the loop considers validation, and itself, done.
    loop.val_loop._has_run = False
    advance = loop.advance

    def rest_of_an_iteration(data_fetcher: DataFetcher) -> None:
        # From here on Lightning's own advance is called, whatever happens below.
        undo()
        _no_restart(trainer)
        if point is not SavePoint.WITHIN:
            # As after a batch; otherwise logged values are reset.
            trainer._logger_connector._first_loop_iter = True
        restore()
        if point is SavePoint.ITERATION and loop._is_training_done:
            raise StopIteration  # which ends the epoch
        if point in (SavePoint.ITERATION, SavePoint.WITHIN):
            advance(data_fetcher)  # nothing is left of the saved iteration
        else:
            loop._skip_next_val = point is SavePoint.VALIDATION

    undo = patch(loop, "advance", rest_of_an_iteration)
    return undo


def resume_after_epoch(trainer: L.Trainer) -> None:
    """Begin the next epoch as any other; call it before ``trainer.fit_loop`` begins that epoch."""
    fit_loop = trainer.fit_loop
    _no_restart(trainer)
    # Otherwise Lightning treats the new epoch as a resumed one: without on_train_epoch_start, and without a new pass
    # over the loaders.
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()
    progress = fit_loop.epoch_progress
    # The values that Lightning leaves once the hooks at the end of an epoch are done.
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = counts.completed = counts.processed


def end_epoch_of_plateau_schedules(trainer: L.Trainer) -> None:
    """Step the plateau schedules: the only change to training that follows the hooks at the end of an epoch."""
    fit_loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    if is_last_batch_taken(trainer):
        now = epochs.completed
        # This is `trainer.current_epoch`, which the schedules count by.
        epochs.completed = epochs.processed - 1
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed = now


def _no_restart(trainer: L.Trainer) -> None:
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._restarting = False


def step_takes_batches(trainer: L.Trainer) -> bool:
    """Whether ``training_step`` receives the iterator and takes as many batches as it likes."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def count_as_ended(trainer: L.Trainer, ended: Sequence[bool]) -> None:
    """Mark which of several loaders have ended once; Lightning cycles them until all have."""
    cycle = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    if isinstance(cycle, _MaxSizeCycle):
        cycle._consumed = [before or now for before, now in zip(cycle._consumed, ended, strict=True)]
