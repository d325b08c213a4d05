"""A run's module, callbacks and settings, copied while they are as the user made them; and other runs made of them."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    Checkpoint,
    LambdaCallback,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_fasttrain.core.host.lightning import TRANSFER_HOOKS
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.data import MicroBatching, TokenWeightedAccumulation
from lightning_fasttrain.data.closure.roles import SharedSplit
from lightning_fasttrain.dry_run.verification.short_run import EnoughError, as_loader, copy_module, forget_run, quietly
from lightning_fasttrain.predict.predict_memory import predict_memory
from lightning_fasttrain.run.guards.hang_watch import HangWatch
from lightning_fasttrain.run.guards.preemption import Preemption
from lightning_fasttrain.run.profiling.memory_timeline import MemoryTimeline
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.technique import Onlooker

# They show, write files, watch this process, or try out settings: none of it belongs to a step or to its state.
_ONLY_LOOK_ON: tuple[type[L.Callback], ...] = (
    ProgressBar,
    ModelSummary,
    Checkpoint,
    Timer,
    BatchSizeFinder,
    LearningRateFinder,
    BasePredictionWriter,
    Preemption,
    HangWatch,
    MemoryTimeline,
    Onlooker,
)
_AS_LARGE = {"16-mixed": "bf16-mixed", "16-true": "bf16-true"}  # whose steps are predicted
_TO_EPOCH_TWO = 2  # epochs: what a rehearsal needs of a run that has fewer


@dataclass
class RunCopy:
    """What a run is made of.

    Attributes:
        module: a copy that stays as it is, prepares no data, and brings no callbacks; each run gets a copy of it.
        callbacks: copies of all of the run's, of which each run gets copies.
        datamodule: the run's own; each run gets a shallow copy with other loaders.
        settings: of its Trainer.
        plugins: its precision, and its checkpoint plugin if that is none of Lightning's.
        notes: what could not be copied.
    """

    module: L.LightningModule
    callbacks: list[L.Callback]
    datamodule: L.LightningDataModule | None
    settings: dict[str, Any]
    plugins: list[Any]
    notes: list[str] = field(default_factory=list)

    @property
    def techniques(self) -> list[Technique]:
        """Copies of them."""
        return copy.deepcopy([callback for callback in self.callbacks if isinstance(callback, Technique)])

    @torch.no_grad()
    def share_equal_weights(self, module: nn.Module) -> None:
        """Let weights that are those of ``module``, bit for bit, be its own memory: both are only read from here on."""
        theirs = dict(module.named_parameters())
        for name, weight in self.module.named_parameters():
            other = theirs.get(name)
            if other is None or type(weight) is not nn.Parameter or type(other) is not nn.Parameter:
                continue  # classes of their own, as of quantised weights, may hold other tensors
            if (weight.dtype, weight.device) == (other.dtype, other.device) and torch.equal(weight, other):
                weight.data = other.data

    @contextmanager
    def module_with_transfer_hooks(self) -> Iterator[L.LightningModule]:
        """The module itself, for who copies it, doing to batches what the datamodule does on their way to a device."""
        with ExitStack() as undo:
            for hook in TRANSFER_HOOKS:
                if self.datamodule is not None and is_overridden(hook, self.datamodule):
                    undo.callback(patch(self.module, hook, getattr(self.datamodule, hook)))
            yield self.module

    def predict_peak(self, trainer: L.Trainer, batch: Any, *others: Technique) -> int:
        """Bytes that a step of this rank takes at its peak, with ``others`` beside its own techniques.

        Raises:
            Exception: it cannot be predicted; of the module's own too, which without values may go another way.
        """
        precision = str(trainer.precision)
        with self.module_with_transfer_hooks() as module, quietly():
            report = predict_memory(
                module,
                batch,
                techniques=[*self.techniques, *others],
                precision=_AS_LARGE.get(precision, precision),
                device=trainer.strategy.root_device.type,
            )
        buckets = 0
        if trainer.world_size > 1:  # DDP holds the gradients once more
            buckets = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        return report.peak_bytes + buckets

    def fit(
        self,
        train: Sequence[Any],
        validation: Sequence[Sequence[Any]],
        follower: L.Callback,
        where: dict[str, Any],
        ckpt_path: Path | None = None,
    ) -> None:
        """Run copies of it all in a Trainer of their own, until ``follower`` raises :class:`EnoughError`.

        Args:
            train: batches of an epoch.
            validation: of each validation loader.
            follower: a callback.
            where: settings of the Trainer that say on which devices.
            ckpt_path: a checkpoint to go on from.
        """
        try:
            self._fit(train, validation, follower, where, ckpt_path)
        finally:
            forget_run(follower)

    def _fit(
        self,
        train: Sequence[Any],
        validation: Sequence[Sequence[Any]],
        follower: L.Callback,
        where: dict[str, Any],
        ckpt_path: Path | None,
    ) -> None:
        module = copy.deepcopy(self.module)
        callbacks = [_without_last_words(callback) for callback in copy.deepcopy(self.callbacks)]
        with quietly(), suppress(EnoughError):
            trainer = L.Trainer(
                **self.settings,
                **where,
                plugins=copy.deepcopy(self.plugins),
                callbacks=[*callbacks, follower],
                logger=DummyLogger(),
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,  # the batches are this rank's already
                num_sanity_val_steps=0,  # the one validation that counts comes at the end of the epoch
            )
            loaders: Any = [as_loader(batches) for batches in validation] or None
            if isinstance(loaders, list) and len(loaders) == 1:
                loaders = loaders[0]
            data: dict[str, Any] = {"train_dataloaders": as_loader(train), "val_dataloaders": loaders}
            if self.datamodule is not None:
                data = {"datamodule": _with_loaders(self.datamodule, **data)}
            trainer.fit(module, **data, ckpt_path=ckpt_path)


def copy_run(trainer: L.Trainer, module: L.LightningModule, without: tuple[type, ...] = ()) -> RunCopy:
    """Copy what a run is made of, before anything of it acts.

    Args:
        trainer: in ``setup``.
        module: its own.
        without: classes of callbacks that are left out.

    Raises:
        TypeError: the module cannot be copied.
    """
    notes: list[str] = []
    callbacks: list[L.Callback] = []
    for callback in trainer.callbacks:
        if isinstance(callback, (*_ONLY_LOOK_ON, *without)):
            continue
        if isinstance(callback, LambdaCallback):
            notes.append("LambdaCallback is left out: functions cannot be copied, and would act on what is the run's.")
            continue
        try:
            callbacks.append(_copy_callback(callback, trainer, module))
            if isinstance(callbacks[-1], MicroBatching | TokenWeightedAccumulation):
                callbacks[-1].shared = SharedSplit()  # the runs of a rehearsal take the same steps
        except Exception as error:
            notes.append(
                f"{type(callback).__name__} is left out: it cannot be copied ({type(error).__name__}: {error})."
            )
    plugins: list[Any] = [copy.deepcopy(trainer.precision_plugin)]
    theirs = trainer.strategy.checkpoint_io
    if type(theirs) is not TorchCheckpointIO:
        plugins.append(copy.deepcopy(theirs))
    settings = {
        "max_epochs": _epochs_again(trainer),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
    }
    datamodule: L.LightningDataModule | None = trainer.datamodule
    copied = copy_module(module)
    copied.prepare_data = MethodType(L.LightningModule.prepare_data, copied)  # the run has prepared the data
    copied.configure_callbacks = _no_callbacks
    return RunCopy(copied, callbacks, datamodule, settings, plugins, notes)


def _copy_callback(callback: L.Callback, trainer: L.Trainer, module: L.LightningModule) -> L.Callback:
    """Without what it has of the run: Lightning gives the module's methods for logging to each callback."""
    alone = copy.copy(callback)
    for name in ("log", "log_dict"):
        vars(alone).pop(name, None)
    return copy.deepcopy(alone, {id(trainer): None, id(module): None})  # the memo: references to these become None


def _epochs_again(trainer: L.Trainer) -> int:
    """As many as the run has, for schedules that ask; two at least."""
    epochs = trainer.max_epochs
    return epochs if epochs is not None and (epochs < 0 or epochs >= _TO_EPOCH_TWO) else _TO_EPOCH_TWO


def _no_callbacks() -> list[L.Callback]:
    return []


def _without_last_words(callback: L.Callback) -> L.Callback:
    """A user's callback that is not told how its run ends: it may send messages. Ours undo there what they did."""
    if not isinstance(callback, Technique):
        callback.on_exception = _say_nothing
    return callback


def _say_nothing(*_: object, **__: object) -> None:
    pass


def _with_loaders(datamodule: L.LightningDataModule, **loaders: Any) -> L.LightningDataModule:
    """The same data as far as a module can ask about them, with a few batches of them as loaders."""
    fresh: Any = copy.copy(datamodule)
    fresh.trainer = None
    for hook in ("prepare_data", "setup", "teardown", "on_exception"):
        setattr(fresh, hook, MethodType(getattr(L.LightningDataModule, hook), fresh))
    fresh.train_dataloader = lambda: loaders["train_dataloaders"]
    fresh.val_dataloader = lambda: loaders["val_dataloaders"] or []
    return fresh
