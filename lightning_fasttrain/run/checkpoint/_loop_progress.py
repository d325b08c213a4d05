"""Where in Lightning's loops a checkpoint was taken, and how a run is made to go on from exactly there.

Lightning saves its counters as they are, in the middle of an iteration, and on resuming leaves out what the iteration
still had to do: the validation that was due, plateau schedules, the end of an epoch, and with ``max_steps`` it ends
an epoch twice. Here the rest of the iteration is run.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import lightning as L
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from lightning_fasttrain.core.host.lightning import is_last_batch_taken
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


class SavePoint(StrEnum):
    """Which part of an iteration had been done."""

    BATCH = "batch"  # a batch is trained; what follows a batch, as validation, is not done
    VALIDATION = "validation"  # the same, and validation is done
    ITERATION = "iteration"  # all that follows a batch is done, and the next has not begun
    EPOCH = "epoch"  # an epoch is done, and the next has not begun
    WITHIN = "within"  # inside a batch, as after an exception: it will be begun again


def save_point(trainer: L.Trainer) -> SavePoint:
    """Where ``trainer`` is now."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    validation = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    # Lightning counts `processed` before the hooks at the end of an epoch, in which checkpoints are saved.
    if epochs.started == epochs.processed:
        return SavePoint.EPOCH
    if trainer.validating:
        done = validation.is_last_batch and validation.current.ready == validation.current.completed
        return SavePoint.VALIDATION if done else SavePoint.BATCH
    # `completed` follows on_train_batch_end, in which checkpoints are saved.
    if batches.ready == batches.processed == batches.completed + 1:
        return SavePoint.BATCH
    return SavePoint.ITERATION if batches.ready == batches.processed == batches.completed else SavePoint.WITHIN


def complete_batch_(checkpoint: dict[str, Any]) -> None:
    """Count the batch that a checkpoint was taken after as completed, so that Lightning neither repeats it nor, at the
    end of an epoch, takes the epoch for done."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]


def go_on_after_batch(trainer: L.Trainer, point: SavePoint, restore: Callable[[], None]) -> Undo:
    """Let the first iteration of the epoch that goes on be the rest of the one in which the checkpoint was taken.

    ``restore`` is called as its first thing, when all that Lightning does before has been done.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.val_loop._has_run = False  # or the loop takes validation, and with it itself, for done
    advance = loop.advance

    def rest_of_an_iteration(data_fetcher: Any) -> None:
        undo()  # from here on Lightning's own advance is called, whatever happens below
        _no_restart(trainer)
        if point is not SavePoint.WITHIN:
            trainer._logger_connector._first_loop_iter = True  # as after a batch, or what is logged next begins again
        restore()
        if point is SavePoint.ITERATION and loop._is_training_done:
            raise StopIteration  # which ends the epoch
        if point in (SavePoint.ITERATION, SavePoint.WITHIN):
            advance(data_fetcher)  # there is no rest
        else:
            loop._skip_next_val = point is SavePoint.VALIDATION

    undo = patch(loop, "advance", rest_of_an_iteration)
    return undo


def go_on_after_epoch(trainer: L.Trainer) -> None:
    """Let the run begin its next epoch as any other; called before ``trainer.fit_loop`` begins it."""
    fit_loop = trainer.fit_loop
    _no_restart(trainer)
    # Otherwise the epoch that begins would be taken for one that goes on: without on_train_epoch_start, and without a
    # new pass over the loaders.
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()
    progress = fit_loop.epoch_progress
    # As Lightning leaves them once the hooks at the end of an epoch are done.
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = counts.completed = counts.processed


def end_epoch_of_plateau_schedules(trainer: L.Trainer) -> None:
    """The one thing that follows the hooks at the end of an epoch and changes training."""
    fit_loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    if is_last_batch_taken(trainer):
        now = epochs.completed
        epochs.completed = epochs.processed - 1  # which is `trainer.current_epoch`, by which they count
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed = now


def _no_restart(trainer: L.Trainer) -> None:
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop._restarting = False


def step_takes_batches(trainer: L.Trainer) -> bool:
    """Whether ``training_step`` is given the iterator, and takes as many batches as it likes."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def iterate_again(trainer: L.Trainer) -> None:
    """Begin the training loaders' pass again: where it has begun, the iterator is one of the old position."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def count_as_ended(trainer: L.Trainer, ended: Sequence[bool]) -> None:
    """Of several loaders that go on until each has ended once, tell which of them have."""
    cycle = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    if isinstance(cycle, _MaxSizeCycle):
        cycle._consumed = [before or now for before, now in zip(cycle._consumed, ended, strict=True)]
