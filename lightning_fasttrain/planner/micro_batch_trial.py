"""A step in parts of a batch: how much memory it should take, and whether a copy of the run takes it on all ranks."""

from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.data import BatchSizeWarmup, MicroBatching, SequenceLengthWarmup, TokenWeightedAccumulation
from lightning_fasttrain.dry_run.rehearsal.context import fill_up
from lightning_fasttrain.dry_run.rehearsal.nested_trainer import devices_again
from lightning_fasttrain.dry_run.rehearsal.run_copy import RunCopy
from lightning_fasttrain.dry_run.verification.short_run import EnoughError, PeakObserver

_ROOM = 0.95  # of the memory of a GPU: what fragmentation and libraries take is not predicted


@dataclass(frozen=True)
class Tried:
    """Result of the steps of a trial.

    Attributes:
        parts: in which the last batch ran: more than asked for where those ran out of memory, on any rank.
        peak_bytes: of the last step, on this rank.
    """

    parts: int
    peak_bytes: int


@dataclass(frozen=True)
class PartTrial:
    """Predicts and tries steps of a run.

    Attributes:
        trainer: of the run.
        run: a copy of what it is made of.
        batch: of each step.
        most: the samples of the largest batch of any rank.
        steps: optimizer steps of a trial, at least 2.
        window: batches of a step.
        predicted: parts → bytes, of those that were asked about.
    """

    trainer: L.Trainer
    run: RunCopy
    batch: Any
    most: int
    steps: int
    window: int
    predicted: dict[int, int] = field(default_factory=dict)

    def predict(self, parts: int) -> float:
        """Bytes that a device should have for a step of this rank.

        Raises:
            Exception: it cannot be predicted; of the module's own too, which without values may go another way.
        """
        peak = self.run.predict_peak(self.trainer, self.batch, MicroBatching(parts))
        self.predicted[parts] = peak
        return peak / (_ROOM if self.trainer.strategy.root_device.type == "cuda" else 1.0)

    def take_steps(self, parts: int) -> Tried:
        """Run some optimizer steps of a copy in so many parts a batch.

        A rank that runs out of memory notifies the others, and all continue with more micro-batches, so that none
        waits, as in :class:`~lightning_fasttrain.MicroBatching`. The last step is measured, which has all state that
        is kept between steps.

        Raises:
            torch.OutOfMemoryError: single samples do not fit; or on several ranks, of which others wait, outside of
                forward and backward.
        """
        adaptive, watch = MicroBatching("auto"), _Watch(self.steps, self.window)
        adaptive.n = parts
        # One batch more than is run, so that none of the steps ends an epoch.
        batches = fill_up([self.batch], self.steps * self.window + 1)
        copies = replace(self.run, callbacks=[*_at_full_size(self.run), adaptive])
        try:
            copies.fit(batches, [], watch, devices_again(self.trainer))
        except torch.OutOfMemoryError:
            if self.trainer.world_size > 1 or parts == self.most:
                raise
            # Memory ran out where MicroBatching cannot retry, for example in the optimizer's step.
            return Tried(parts + 1, 0)
        return Tried(min(watch.parts, self.most), watch.peak_bytes)


def _at_full_size(run: RunCopy) -> list[L.Callback]:
    """The callbacks as they act once nothing grows any more, which takes most."""
    grown: list[L.Callback] = []
    for callback in run.callbacks:
        if isinstance(callback, BatchSizeWarmup):
            grown.append(TokenWeightedAccumulation(callback.growth.full, count=callback.count, check=callback.check))
        elif not isinstance(callback, MicroBatching | SequenceLengthWarmup):
            grown.append(callback)
    return grown


class _Watch(PeakObserver, Checkpoint):
    """Ends the run after some steps, and measures the last; itself the last callback, where Lightning puts savers."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps, self.window = steps, window
        self.parts = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # On the CPU the meter is torch's profiler, of which a process can run one at a time.
        if batch_idx == (self.steps - 1) * self.window and not torch.autograd._profiler_enabled():
            self.begin_measuring(pl_module.device, pl_module, trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if accumulation_continues(trainer) or batch_idx + 1 < self.steps * self.window:
            return
        self.end_measuring()
        self.parts = next(callback.n for callback in trainer.callbacks if isinstance(callback, MicroBatching))
        raise EnoughError
