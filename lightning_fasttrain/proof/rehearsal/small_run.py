"""A small run: a complete and a short window, validation, an epoch's end, a checkpoint, and the first step after it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lightning_fasttrain.core.device import device_clock
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.proof.rehearsal.state_record import State, record_attributes, record_state
from lightning_fasttrain.proof.verification.short_run import EnoughError
from lightning_fasttrain.trial.runs import loss_of


@dataclass(frozen=True)
class Saving:
    """The checkpoints that the run saves.

    Attributes:
        path: path of the checkpoint.
        within_epochs: after the first optimizer step rather than at the end of validation or of the epoch.
        weights_only: as set in ModelCheckpoint.
        twice: whether a second checkpoint, with ``-later``, is saved at the end, so that a plugin that loads another
            file than requested has one to load.
    """

    path: Path
    within_epochs: bool
    weights_only: bool
    twice: bool

    @property
    def later(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-later{self.path.suffix}")


@dataclass
class Course:
    """Observations of a run.

    Attributes:
        saved, saved_attributes: the state that was saved; of a resumed run, its initial state.
        end: the state after the first optimizer step of the second epoch.
        losses: losses of the batches of that step.
        metrics: names of logged values, at the end of the first epoch.
        step_s, save_s: seconds of that step, and of the first save.
        loaded: content of the checkpoint, loaded at once, if it has weights only.
        reached: the latest phase, for error messages.
    """

    saved: State = field(default_factory=dict)
    saved_attributes: State = field(default_factory=dict)
    end: State = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    step_s: float = 0.0
    save_s: float = 0.0
    loaded: Any = None
    reached: str = "the set-up"


class Follower(Checkpoint):
    """Records a course; runs last of the callbacks, where Lightning puts checkpoint callbacks.

    Args:
        saving: None for a run that resumes from a checkpoint.
    """

    def __init__(self, saving: Saving | None) -> None:
        self.course = Course()
        self.saving = saving
        self.is_saved = False
        self.began: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.saving is None:
            self._record(trainer, pl_module)  # everything is restored by now

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self.course.reached = "a training step"
        if self.began is None:
            self.course.losses = []  # the losses of the last step are kept
            self.began = device_clock(trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if outputs:
            self.course.losses.append(float(loss_of(outputs)))
        if accumulation_continues(trainer):
            return
        self.course.step_s, self.began = device_clock(trainer.strategy.root_device) - (self.began or 0.0), None
        if self.saving is not None and self.saving.within_epochs:
            self._save_once(trainer, pl_module)
        if trainer.current_epoch > 0:
            self.course.end = record_state(trainer, pl_module)
            if self.saving is not None and self.saving.twice:
                self.course.reached = "the second save"
                trainer.save_checkpoint(self.saving.later, weights_only=self.saving.weights_only)
            raise EnoughError

    def on_validation_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        self.course.reached = "validation"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.course.metrics += list(trainer.callback_metrics)
        self._save_once(trainer, pl_module)
        self.course.reached = "the end of an epoch"

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.course.metrics += list(trainer.callback_metrics)
        self._save_once(trainer, pl_module)

    def _save_once(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        saving = self.saving
        if saving is None or self.is_saved:
            return
        self.is_saved = True
        self._record(trainer, module)
        self.course.reached = "the save of a checkpoint"
        began = device_clock(trainer.strategy.root_device)
        trainer.save_checkpoint(saving.path, weights_only=saving.weights_only)
        self.course.save_s = device_clock(trainer.strategy.root_device) - began
        if saving.weights_only:
            self.course.loaded = trainer.strategy.load_checkpoint(saving.path)

    def _record(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.course.saved = record_state(trainer, module)
        self.course.saved_attributes = record_attributes(trainer, module)
