"""Whether parts of a batch fit: a few real steps of a copy of the run, with its own callbacks, on all its ranks."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_fasttrain._host import step_goes_on
from lightning_fasttrain.data import BatchSizeWarmup, MicroBatching, SequenceLengthWarmup, TokenWeightedAccumulation
from lightning_fasttrain.plan.rehearsal.rehearsed import fill_up
from lightning_fasttrain.plan.rehearsal.run_copy import EnoughError, RunCopy
from lightning_fasttrain.plan.rehearsal.same_processes import devices_again
from lightning_fasttrain.run.memory_meter import PeakMemory


@dataclass(frozen=True)
class Tried:
    """How the steps of a trial went.

    Attributes:
        parts: in which the last batch ran: more than asked for where those ran out of memory, on any rank.
        peak_bytes: of the last step, on this rank.
    """

    parts: int
    peak_bytes: int


def try_parts(
    trainer: L.Trainer, run: RunCopy, batch: Any, parts: int, *, steps: int, window: int, limit_of_parts: int
) -> Tried:
    """Run some optimizer steps of a copy in so many parts a batch.

    A rank that runs out of memory tells the others, and all go on with more parts, so that none waits for another: as
    in :class:`~lightning_fasttrain.MicroBatching`. What is kept from step to step is there in the last, which is
    measured.

    Args:
        trainer: of the run.
        run: a copy of what it is made of.
        batch: of each step.
        parts: of a batch.
        steps: at least 2.
        window: batches of a step.
        limit_of_parts: the samples of the largest batch of any rank.

    Raises:
        torch.OutOfMemoryError: single samples do not fit.
    """
    adaptive = MicroBatching("auto")
    adaptive.n = parts
    watch = _Watch(steps, window)
    batches = fill_up([batch], steps * window + 1)  # so that none of the steps is the last of an epoch
    replace(run, callbacks=[*_at_full_size(run), adaptive]).fit(batches, [], watch, devices_again(trainer))
    return Tried(min(watch.parts, limit_of_parts), watch.peak_bytes)


def _at_full_size(run: RunCopy) -> list[L.Callback]:
    """The callbacks as they act once nothing grows any more, which takes most."""
    grown: list[L.Callback] = []
    for callback in run.callbacks:
        if isinstance(callback, BatchSizeWarmup):
            grown.append(TokenWeightedAccumulation(callback.growth.full, count=callback.count, check=callback.check))
        elif not isinstance(callback, MicroBatching | SequenceLengthWarmup):
            grown.append(callback)
    return grown


class _Watch(Checkpoint):
    """Ends the run after some steps, and measures the last. The last of the callbacks, where Lightning puts those that
    save."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps, self.window = steps, window
        self.parts = self.peak_bytes = 0
        self.measuring = contextlib.ExitStack()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == (self.steps - 1) * self.window and not torch.autograd._profiler_enabled():
            self.meter = PeakMemory(pl_module.device, pl_module, trainer.optimizers, batch)
            self.measuring.enter_context(self.meter)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if step_goes_on(trainer) or batch_idx + 1 < self.steps * self.window:
            return
        self.measuring.close()
        meter = getattr(self, "meter", None)
        self.peak_bytes = 0 if meter is None else meter.peak_bytes
        self.parts = next(callback.n for callback in trainer.callbacks if isinstance(callback, MicroBatching))
        raise EnoughError
