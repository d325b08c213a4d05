"""Run a few steps of a model's copy in a Trainer of their own."""

import copy
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fasttrain.core.device import return_unused_memory
from lightning_fasttrain.core.host.lightning import without_trainer
from lightning_fasttrain.core.messages import FastTrainWarning, explain, log
from lightning_fasttrain.core.modules.without_dropout import without_dropout
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.technique import Technique

_LOW = (torch.bfloat16, torch.float16)
_SEED = 1_000_003  # of the first step; any number that nobody's own seed is likely to be


@dataclass(frozen=True)
class Steps:
    """Which steps are run.

    Attributes:
        module: left as it is; copies are run.
        batches: one for each step, or for each part of one.
        settings: of the Trainer.
        dropout: whether it stays on.
        in_float32: whether weights, buffers and batches of 16 bits are run in float32.
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
        What the suite warned about.

    Raises:
        TypeError: the module cannot be copied.
        Exception: whatever the module, or a technique, raises.
    """
    try:
        return _run_copy(of, techniques, watcher)
    finally:
        forget_run(watcher)


def forget_run(watcher: L.Callback) -> None:
    """Free the memory of a run that is over, of which only a callback is still needed."""
    for name in ("log", "log_dict"):  # the module's own, which Lightning gives to each callback
        vars(watcher).pop(name, None)
    return_unused_memory()  # a Trainer and its model know one another: without this there would soon be two of them


def _run_copy(of: Steps, techniques: Sequence[Technique], watcher: L.Callback) -> list[str]:
    module, batches, validation = copy_module(of.module), list(of.batches), [of.validation]
    validates = of.validation is not None and is_overridden("validation_step", module)
    if not of.dropout:
        without_dropout(module)
    if of.in_float32:
        batches, validation = apply_to_collection([batches, validation], Tensor, _in_float32)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _in_float32(tensor.data)
    with isolate_rng(), quietly() as warned, _only_these_techniques(module):
        seed_step(0)
        trainer = L.Trainer(
            **{
                "accelerator": "auto",
                "devices": 1,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
                "num_sanity_val_steps": 0,
                "limit_val_batches": int(validates),
                "val_check_interval": len(batches),
                "max_epochs": 1000,  # what Lightning takes where nothing is said, without its warning
                **of.settings,
            },
            # The one that ends the run is last, so that the watcher sees the end of the last batch.
            callbacks=[*copy.deepcopy(list(techniques)), watcher, _StopAfter(len(batches))],
        )
        # As many again, so that none of the steps is the last of an epoch.
        loader = as_loader([*batches, *batches, batches[0]])
        with suppress(EnoughError):
            trainer.fit(module, loader, as_loader(validation) if validates else None)
    return warned


def copy_module(module: L.LightningModule) -> L.LightningModule:
    """A copy without the Trainer that ``module`` may be attached to.

    Raises:
        TypeError: it cannot be copied.
    """
    try:
        with without_trainer(module):
            return copy.deepcopy(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        way_out = "Give a function that builds it: lambda: MyModule(...)"
        raise TypeError(explain(f"{type(module).__name__} cannot be copied", why, way_out)) from error


def seed_step(number: int) -> None:
    """Seed what a step may draw from. Lightning's own function would leave environment variables behind."""
    random.seed(_SEED + number)
    np.random.seed(_SEED + number)
    torch.manual_seed(_SEED + number)


def _in_float32(tensor: Tensor) -> Tensor:
    """A tensor of 16 bits in float32; others, float64 among them, as they are."""
    return tensor.float() if tensor.dtype in _LOW else tensor


class EnoughError(Exception):
    """Ends a fit before anything that belongs to the end of an epoch."""


class _StopAfter(L.Callback):
    """Ends a fit after so many batches, and the validation that follows them."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batches:
            raise EnoughError


class _Listed(Dataset[Any]):
    """Batches, each time a new copy; in what ExactResume does not compare between ranks as a dataset's samples."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = dict(enumerate(batches))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return copy_batch(self.batches[index])


def as_loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """A loader of these batches as they are."""
    return DataLoader(_Listed(batches), batch_size=None, collate_fn=as_it_is)


def as_it_is(batch: Any) -> Any:
    return batch


def copy_batch(batch: Any) -> Any:
    return apply_to_collection(batch, Tensor, torch.clone)


@contextmanager
def _only_these_techniques(module: L.LightningModule) -> Iterator[None]:
    """A module that brings techniques along must not add them to a plain run."""
    own = module.configure_callbacks

    def configure_callbacks() -> list[L.Callback]:
        brought: Any = own() or []
        listed = [brought] if isinstance(brought, L.Callback) else brought
        return [callback for callback in listed if not isinstance(callback, Technique)]

    restore = patch(module, "configure_callbacks", configure_callbacks)
    try:
        yield
    finally:
        restore()


@contextmanager
def quietly() -> Iterator[list[str]]:
    """What would be said in every run is not said; what the suite warns about is in the list, at the end."""
    warned: list[str] = []
    loggers = [log, logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", FastTrainWarning)
            yield warned
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        warned += [str(one.message) for one in caught]
