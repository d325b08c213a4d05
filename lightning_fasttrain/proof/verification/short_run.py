"""Run a few steps of a copy of a model in a separate Trainer."""

import copy
import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fasttrain.core.device import device_clock, return_unused_memory
from lightning_fasttrain.core.host.lightning import list_callbacks, without_trainer
from lightning_fasttrain.core.messages import FastTrainWarning, explain, log, quiet_libraries
from lightning_fasttrain.core.modules.wrapped_forward import patch, without_dropout
from lightning_fasttrain.core.peak_memory import PeakMemory
from lightning_fasttrain.technique import Technique

_LOW = (torch.bfloat16, torch.float16)
_SEED = 1_000_003  # of the first step; a value unlikely to be a user's own seed


@dataclass(frozen=True)
class Steps:
    """The steps to run.

    Attributes:
        module: the module, which is not changed; copies are run.
        batches: one for each step, or for each micro-batch of a step.
        settings: settings of the Trainer.
        dropout: whether dropout stays on.
        in_float32: whether 16-bit weights, buffers and batches are converted to float32.
        validation: a batch that a module with a ``validation_step`` validates after the last step; None for none.
    """

    module: L.LightningModule
    batches: Sequence[Any]
    settings: dict[str, Any]
    dropout: bool = True
    in_float32: bool = False
    validation: Any = None


def run_steps(of: Steps, techniques: Sequence[Technique], watcher: L.Callback) -> list[str]:
    """Run the batches on a copy, with copies of ``techniques`` and with ``watcher``, which is called last.

    Returns:
        Warnings of the suite.

    Raises:
        TypeError: the module cannot be copied.
        Exception: any error of the module or a technique.
    """
    module, batches, validation = copy_module(of.module), list(of.batches), [of.validation]
    validates = of.validation is not None and is_overridden("validation_step", module)
    if not of.dropout:
        without_dropout(module)
    if of.in_float32:
        batches, validation = apply_to_collection([batches, validation], Tensor, _in_float32)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _in_float32(tensor.data)
    settings = {
        "accelerator": "auto",
        "devices": 1,
        "logger": DummyLogger(),  # a module may call its logger
        "limit_val_batches": int(validates),
        # Validation follows the last step, since the end of the epoch is never reached.
        "val_check_interval": len(batches),
        # Lightning's default number of epochs, without its warning.
        "max_epochs": 1000,
        **of.settings,
        # StopAfter is a checkpoint callback, and Lightning adds none beside it.
        "enable_checkpointing": True,
    }
    # The callback that ends the run is last, so that the watcher sees the end of the last batch.
    observers = [watcher, StopAfter(len(batches))]
    # Twice as many, so that none of the steps is the last of an epoch.
    loaders = [as_loader([*batches, *batches, batches[0]]), as_loader(validation) if validates else None]
    with isolate_rng(), _only_these_techniques(module):
        # Seeded before the fit too, since techniques may draw initial weights of adapters.
        seed_step(0)
        return fit_quietly(module, copy.deepcopy(list(techniques)), observers, settings, *loaders)


def fit_quietly(
    module: L.LightningModule,
    callbacks: Sequence[L.Callback],
    observers: Sequence[L.Callback],
    settings: Mapping[str, object],
    *data: Any,
    **more: Any,
) -> list[str]:
    """Fit in a Trainer of its own until an observer raises :class:`EnoughError`, and free the memory of the run.

    Args:
        module: a copy, which is trained.
        callbacks: copies of those of the run.
        observers: callbacks that are called last, and kept.
        settings: of the Trainer.
        data, more: further arguments of ``fit``.

    Returns:
        Warnings of the suite.
    """
    try:
        with quietly() as warned, suppress(EnoughError):
            trainer = L.Trainer(
                **{
                    "enable_progress_bar": False,
                    "enable_model_summary": False,
                    "use_distributed_sampler": False,  # the batches belong to this rank
                    "num_sanity_val_steps": 0,  # validation comes after the steps
                    **settings,
                },
                callbacks=[*callbacks, *observers],
            )
            trainer.fit(module, *data, **more)
        return warned
    finally:
        for observer in observers:
            # Lightning assigns these methods of the module to each callback.
            for name in ("log", "log_dict"):
                vars(observer).pop(name, None)
        # A Trainer and its model reference each other, and would otherwise stay in memory.
        return_unused_memory()


def copy_module(module: L.LightningModule) -> L.LightningModule:
    """Copy ``module`` without the Trainer to which it may be attached.

    Raises:
        TypeError: the module cannot be copied.
    """
    try:
        with without_trainer(module):
            return copy.deepcopy(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        way_out = "Pass a function that builds it: lambda: MyModule(...)"
        raise TypeError(explain(f"{type(module).__name__} cannot be copied", why, way_out)) from error


def seed_step(number: int) -> None:
    """Seed all generators that a step may use. Lightning's own function would leave environment variables behind."""
    random.seed(_SEED + number)
    np.random.seed(_SEED + number)
    torch.manual_seed(_SEED + number)


def _in_float32(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32; return others, including float64, unchanged."""
    return tensor.float() if tensor.dtype in _LOW else tensor


class EnoughError(Exception):
    """Ends a fit before the end of an epoch is processed."""


class PeakObserver(L.Callback):
    """Base class of observers that measure the peak memory of one step.

    Attributes:
        peak_bytes: of the step; the largest, if several are measured.
    """

    peak_bytes = 0
    _meter: PeakMemory | None = None

    def begin_measuring(self, device: torch.device, *held: object) -> None:
        """Begin before a step; ``held`` is in memory already: the model, its optimizers and the batch."""
        self._meter = PeakMemory(device, *held).__enter__()  # which may refuse: then nothing is to be ended

    def end_measuring(self) -> None:
        """End after the step, if it is measured."""
        if self._meter is not None:
            meter, self._meter = self._meter, None
            meter.__exit__()
            self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: a step that failed has left its meter open, and torch's profiler runs once in a process."""
        self.end_measuring()


FEWEST_TIMED, MOST_TIMED, _SECONDS = 2, 12, 0.5  # steps that are timed: as many as that takes, between the two


class StepClock(PeakObserver):
    """Times steps, then measures the memory of one more, and ends the run. Data loading counts as part of a step.

    Args:
        warmup: steps before those that are timed.
        peak: whether memory is measured.

    Attributes:
        times: milliseconds of each step, the warm-up included.
    """

    def __init__(self, warmup: int, peak: bool = True) -> None:
        self.warmup, self.peak = warmup, peak
        self.times: list[float] = []
        self._since = 0.0
        self._is_measuring = False

    @property
    def timed(self) -> list[float]:
        """The time of each step after the warm-up, in ms."""
        return self.times[self.warmup :]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = device_clock(pl_module.device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        # Only when all times are there: measuring memory slows a step down.
        if self._has_enough():
            self._is_measuring = True
            self.begin_measuring(pl_module.device, pl_module, trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        now = device_clock(pl_module.device)
        if self._is_measuring:
            self.end_measuring()
            raise EnoughError
        self.times.append(1e3 * (now - self._since))
        self._since = now
        if self._has_enough() and not self.peak:
            raise EnoughError

    def _has_enough(self) -> bool:
        enough_time = sum(self.timed) >= 1e3 * _SECONDS
        return len(self.timed) >= FEWEST_TIMED and (enough_time or len(self.timed) >= MOST_TIMED)


class StopAfter(Checkpoint):
    """Ends a fit after ``batches`` batches of its first epoch, and the validation that follows them.

    A ``Checkpoint``, so that Lightning calls it last and does not add a ``ModelCheckpoint``.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == self.batches:
            raise EnoughError


class _Listed(Dataset[Any]):
    """Dataset of batches, returned as new copies; its data are invisible to ExactResume's comparison of datasets."""

    def __init__(self, batches: Sequence[object]) -> None:
        self.batches = dict(enumerate(batches))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return copy_batch(self.batches[index])


def as_loader(batches: Sequence[object]) -> DataLoader[Any]:
    """Return a loader of these batches, without collation."""
    return DataLoader(_Listed(batches), batch_size=None, collate_fn=as_it_is)


def say_nothing(*_: object, **__: object) -> None:
    """Stand in for a method that logs or sends messages."""


def as_it_is(batch: object) -> Any:
    return batch


def copy_batch(batch: object) -> Any:
    return apply_to_collection(batch, Tensor, torch.clone)


@contextmanager
def _only_these_techniques(module: L.LightningModule) -> Iterator[None]:
    """Hide the techniques that a module brings from a plain run."""
    own = module.configure_callbacks

    def configure_callbacks() -> list[L.Callback]:
        return [callback for callback in list_callbacks(own) if not isinstance(callback, Technique)]

    restore = patch(module, "configure_callbacks", configure_callbacks)
    try:
        yield
    finally:
        restore()


@contextmanager
def quietly() -> Iterator[list[str]]:
    """Silence what every run would print; yield a list that holds the suite's warnings at the end."""
    warned: list[str] = []
    loggers = [log, logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with quiet_libraries(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", FastTrainWarning)
            try:
                yield warned
            finally:
                warned += [str(one.message) for one in caught]
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
