"""Count the optimizer steps of a run from the Trainer's settings, without making or reading a loader."""

import math
from collections.abc import Callable

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_fasttrain.core.host.lightning import training_loaders
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.technique.technique import Technique

_WAY_OUT = "Give the total, as total=10_000"


def is_length_known(trainer: L.Trainer) -> bool:
    """Whether the length of the run can be computed, which needs the training loaders."""
    return training_loaders(trainer) is not None


def total_steps(trainer: L.Trainer) -> int:
    """Return the number of optimizer steps of the run: ``max_steps``, or those of its epochs if they are fewer.

    Accumulation counts as it will be, with short windows at the ends of epochs and schedules of factors. Unlike
    ``trainer.estimated_stepping_batches`` it makes no loaders: ask once Lightning has made them.

    Raises:
        ValueError: it cannot be known: loaders without a length, no end, or a module that steps by itself.
    """
    _refuse_manual(trainer)
    allowed = math.inf if trainer.max_steps == -1 else trainer.max_steps
    epochs = trainer.max_epochs
    if epochs is None or epochs < 0 or math.isinf(trainer.num_training_batches):
        if math.isinf(allowed):
            what = f"max_epochs={epochs}, max_steps={trainer.max_steps}, {trainer.num_training_batches} batches"
            raise ValueError(explain(what, "the length of the run is not known", f"{_WAY_OUT}, or max_steps"))
        return int(allowed)
    return int(max(1, min(allowed, steps_of_epochs(trainer, epochs))))


def steps_of_epochs(trainer: L.Trainer, epochs: float) -> float:
    """Return the number of optimizer steps in the first epochs of a run; of a fraction of an epoch, its share.

    Raises:
        ValueError: as for :func:`total_steps`.
    """
    _refuse_manual(trainer)
    batches = trainer.num_training_batches
    if math.isinf(batches):
        what = f"a length of {epochs:g} epochs"
        raise ValueError(explain(what, "the training loader has no length", "Give it in steps"))
    windows, whole = _windows_of(trainer), math.floor(epochs)
    steps = 0
    for epoch in range(whole):
        steps += windows(int(batches), epoch, steps)
    rest = epochs - whole
    return steps + rest * windows(int(batches), whole, steps) if rest else steps


def _windows_of(trainer: L.Trainer) -> Callable[[int, int, int], int]:
    """Return a function (batches of an epoch, the epoch, earlier steps) → its steps; the last window may be short.

    Who decides about windows is asked: the first of them, as two are refused.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, Technique) and callback.count_windows(1, 0, 0) is not None:
            return callback.count_windows  # pyright: ignore[reportReturnType]
        if isinstance(callback, GradientAccumulationScheduler):
            scheduler = callback
            return lambda batches, epoch, _: math.ceil(batches / scheduler.get_accumulate_grad_batches(epoch))
    return lambda batches, epoch, _: math.ceil(batches / trainer.accumulate_grad_batches)


def _refuse_manual(trainer: L.Trainer) -> None:
    if not trainer.lightning_module.automatic_optimization:
        why = "how often the module steps its optimizers is its own affair"
        raise ValueError(explain("automatic_optimization=False", why, _WAY_OUT))
