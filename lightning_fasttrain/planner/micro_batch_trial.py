"""Predict the memory of a step in micro-batches, and try it on a copy of the run on all ranks."""

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

_ROOM = 0.95  # of the memory of a GPU: fragmentation and libraries are not predicted


@dataclass(frozen=True)
class Tried:
    """Result of the steps of a trial.

    Attributes:
        parts: number of micro-batches of the last batch: more than requested if any rank ran out of memory.
        peak_bytes: peak memory of the last step on this rank.
    """

    parts: int
    peak_bytes: int


@dataclass(frozen=True)
class PartTrial:
    """Predicts and tries steps of a run.

    Attributes:
        trainer: the Trainer of the run.
        run: a copy of the run.
        batch: the batch of each step.
        most: number of samples in the largest batch of any rank.
        steps: number of optimizer steps of a trial, at least 2.
        window: number of batches per optimizer step.
        predicted: number of micro-batches → predicted bytes.
    """

    trainer: L.Trainer
    run: RunCopy
    batch: Any
    most: int
    steps: int
    window: int
    predicted: dict[int, int] = field(default_factory=dict)

    def predict(self, parts: int) -> float:
        """Return the bytes that a device should have for a step of this rank.

        Raises:
            Exception: it cannot be predicted; also on errors of the module, which may take another path without values.
        """
        peak = self.run.predict_peak(self.trainer, self.batch, MicroBatching(parts))
        self.predicted[parts] = peak
        return peak / (_ROOM if self.trainer.strategy.root_device.type == "cuda" else 1.0)

    def take_steps(self, parts: int) -> Tried:
        """Run some optimizer steps of a copy, with each batch in ``parts`` micro-batches.

        A rank that runs out of memory notifies the others, and all continue with more micro-batches, so that none
        waits, as in :class:`~lightning_fasttrain.MicroBatching`. The last step is measured, which has all state that
        is kept between steps.

        Raises:
            torch.OutOfMemoryError: single samples do not fit; or, on several ranks, memory ran out outside of forward
                and backward, where the other ranks cannot follow.
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
    """Return the callbacks as they act at the end of all warm-ups, when a step takes most memory."""
    grown: list[L.Callback] = []
    for callback in run.callbacks:
        if isinstance(callback, BatchSizeWarmup):
            grown.append(TokenWeightedAccumulation(callback.growth.full, count=callback.count, check=callback.check))
        elif not isinstance(callback, MicroBatching | SequenceLengthWarmup):
            grown.append(callback)
    return grown


class _Watch(PeakObserver, Checkpoint):
    """Measures the last of some steps, and then ends the run; a ``Checkpoint``, which Lightning calls last."""

    def __init__(self, steps: int, window: int) -> None:
        self.steps, self.window = steps, window
        self.parts = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        # On the CPU the meter is torch's profiler, of which a process can run one at a time.
        if batch_idx == (self.steps - 1) * self.window and not torch.autograd._profiler_enabled():
            self.begin_measuring(pl_module.device, pl_module, trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if accumulation_continues(trainer) or batch_idx + 1 < self.steps * self.window:
            return
        self.end_measuring()
        self.parts = next(callback.n for callback in trainer.callbacks if isinstance(callback, MicroBatching))
        raise EnoughError
