"""Copy a run's module, callbacks and settings before they act, and start other runs from the copies."""

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
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
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_fasttrain.core.device import return_unused_memory
from lightning_fasttrain.core.host.lightning import TRANSFER_HOOKS, ddp_again
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.guards.hang_watch import HangWatch
from lightning_fasttrain.guards.preemption import Preemption
from lightning_fasttrain.memory.predict_memory import predict_memory
from lightning_fasttrain.profiling.memory_timeline import MemoryTimeline
from lightning_fasttrain.proof.verification.short_run import as_loader, copy_module, fit_quietly, quietly, say_nothing
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.technique import EarlyObserver


class SameProcesses(ClusterEnvironment):
    """The environment of a running Trainer, whose processes and connections already exist."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.ranks = trainer.global_rank, trainer.local_rank, trainer.node_rank
        self.size = trainer.world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # not used: connections already exist

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.ranks[0]

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.ranks[1]

    def node_rank(self) -> int:
        return self.ranks[2]


def find_unrehearsable(trainer: L.Trainer) -> str | None:
    """Return why a second run cannot be run beside this one; None if it can."""
    strategy = trainer.strategy
    # Exactly DDP: DeepSpeed's strategy, which shards, inherits from it.
    if type(strategy) is DDPStrategy or isinstance(strategy, SingleDeviceStrategy):
        return None
    return f"a copy cannot be run beside {type(strategy).__name__}"


def devices_again(trainer: L.Trainer) -> dict[str, Any]:
    """Return settings for a Trainer that runs on the devices of ``trainer``, on all its ranks."""
    strategy = trainer.strategy
    settings: dict[str, Any] = one_device_again(trainer)
    if isinstance(strategy, DDPStrategy):
        settings["devices"] = trainer.device_ids if strategy.root_device.type == "cuda" else trainer.num_devices
        settings["num_nodes"] = trainer.num_nodes
        settings["strategy"] = ddp_again(strategy, SameProcesses(trainer))
    return settings


def one_device_again(trainer: L.Trainer) -> dict[str, Any]:
    """Return settings for a Trainer on the device of this rank only."""
    device = trainer.strategy.root_device
    devices: int | list[int] = 1 if device.index is None else [device.index]
    return {"accelerator": type(trainer.accelerator)(), "devices": devices}


@contextmanager
def leaving_no_trace(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Restore random states, torch's global flags and the environment; only copies of the run's objects may act.

    On a GPU the run's weights and optimizer state are moved to host memory meanwhile, to make space for the copy.
    """
    numbers, switches, environment = random_state(), _switches(), dict(os.environ)
    move_back = _park(trainer, module)
    try:
        yield
    finally:
        return_unused_memory()  # the copies reference one another
        move_back()  # once the copies' memory is freed
        _set_switches(switches)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            # Code compiled for the copies would count towards the run's recompilation limit.
            dynamo.reset()
        # Random states come last, since the lines above may draw random numbers.
        set_random_state(numbers)


def _switches() -> tuple[Any, ...]:
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    return *deterministic, *cudnn, torch.is_grad_enabled(), torch.get_default_dtype()


def _set_switches(switches: tuple[Any, ...]) -> None:
    deterministic, warn_only, benchmark, of_cudnn, grad, dtype = switches
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, of_cudnn
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)


def _park(trainer: L.Trainer, module: L.LightningModule) -> Callable[[], None]:
    """Move tensors of the run from the GPU to the host; return how to move them back. The tensor objects stay."""
    parked: list[tuple[Tensor, torch.device]] = []
    held = [*module.parameters(), *module.buffers()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            held += filter(torch.is_tensor, state.values())
    for tensor in held:
        # Others may share the memory, as in an LSTM, and would not follow.
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes
        # Subclasses, such as quantized weights, may hold other tensors, which `data` does not move.
        if tensor.is_cuda and alone and type(tensor) in (Tensor, nn.Parameter):
            parked.append((tensor, tensor.device))
            tensor.data = tensor.data.cpu()

    def move_back() -> None:
        for tensor, device in parked:
            tensor.data = tensor.data.to(device)

    return move_back


# Callbacks that show, write files, monitor this process, or search settings: they do not affect a step or its state.
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
    EarlyObserver,
)
_TO_EPOCH_TWO = 2  # epochs: the minimum for a rehearsal


@dataclass
class RunCopy:
    """Copies of the objects of a run.

    Attributes:
        module: a copy that is never changed, prepares no data, and brings no callbacks; each run gets a copy of it.
        callbacks: copies of all callbacks of the run; each run gets copies of them.
        datamodule: the run's own; each run gets a shallow copy with other loaders.
        settings: settings of its Trainer.
        plugins: its precision plugin, and its checkpoint plugin if that is not one of Lightning's.
        notes: objects that could not be copied.
    """

    module: L.LightningModule
    callbacks: list[L.Callback]
    datamodule: L.LightningDataModule | None
    settings: dict[str, Any]
    plugins: list[Any]
    notes: list[str] = field(default_factory=list)

    @property
    def techniques(self) -> list[Technique]:
        """Copies of the techniques."""
        return copy.deepcopy([callback for callback in self.callbacks if isinstance(callback, Technique)])

    @torch.no_grad()
    def share_equal_weights(self, module: nn.Module) -> None:
        """Let weights that are bitwise equal to those of ``module`` share its memory: both are only read."""
        theirs = dict(module.named_parameters())
        for name, weight in self.module.named_parameters():
            other = theirs.get(name)
            if other is None or type(weight) is not nn.Parameter or type(other) is not nn.Parameter:
                # Subclasses, such as quantized weights, may hold other tensors.
                continue
            if (weight.dtype, weight.device) == (other.dtype, other.device) and torch.equal(weight, other):
                weight.data = other.data

    @contextmanager
    def module_with_transfer_hooks(self) -> Iterator[L.LightningModule]:
        """Yield the module, to be copied, with the datamodule's transfer hooks for batches."""
        with ExitStack() as undo:
            for hook in TRANSFER_HOOKS:
                if self.datamodule is not None and is_overridden(hook, self.datamodule):
                    undo.callback(patch(self.module, hook, getattr(self.datamodule, hook)))
            yield self.module

    def predict_peak(self, trainer: L.Trainer, batch: object, *others: Technique) -> int:
        """Return the peak memory of a step on this rank in bytes, with ``others`` beside its own techniques.

        Raises:
            Exception: it cannot be predicted; also on errors of the module, which may take another path without values.
        """
        precision = str(trainer.precision)
        with self.module_with_transfer_hooks() as module, quietly():
            report = predict_memory(
                module,
                batch,
                techniques=[*self.techniques, *others],
                precision=precision,
                device=trainer.strategy.root_device.type,
            )
        buckets = 0
        # DDP holds a second copy of the gradients in its buckets.
        if trainer.world_size > 1:
            buckets = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        return report.peak_bytes + buckets

    def fit(
        self,
        train: Any,
        validation: Sequence[Sequence[object]],
        follower: L.Callback,
        where: Mapping[str, object],
        ckpt_path: Path | None = None,
    ) -> None:
        """Run copies of all objects in a separate Trainer, until ``follower`` raises ``EnoughError``.

        Args:
            train: batches of an epoch, or a loader.
            validation: batches of each validation loader.
            follower: a callback.
            where: Trainer settings that select the devices.
            ckpt_path: a checkpoint to resume from.
        """
        callbacks = list(map(_without_last_words, copy.deepcopy(self.callbacks)))
        settings = {**self.settings, **where, "plugins": copy.deepcopy(self.plugins), "logger": DummyLogger()}
        loaders: Any = list(map(as_loader, validation)) or None
        if isinstance(loaders, list) and len(loaders) == 1:
            loaders = loaders[0]
        batches = as_loader(train) if isinstance(train, list) else train  # a loader as it is
        data: dict[str, Any] = {"train_dataloaders": batches, "val_dataloaders": loaders}
        if self.datamodule is not None:
            data = {"datamodule": _with_loaders(self.datamodule, **data)}
        fit_quietly(copy.deepcopy(self.module), callbacks, [follower], settings, **data, ckpt_path=ckpt_path)


def copy_run(trainer: L.Trainer, module: L.LightningModule, without: tuple[type, ...] = ()) -> RunCopy:
    """Copy the objects of a run before any of them acts.

    Args:
        trainer: the Trainer, in ``setup``.
        module: its module.
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
            notes.append("LambdaCallback is left out: its functions cannot be copied, and would act on the run itself.")
            continue
        try:
            callbacks.append(_copy_callback(callback, trainer, module))
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
    """Copy a callback without its references to the run: Lightning assigns log methods of the module to each."""
    alone = copy.copy(callback)
    for name in ("log", "log_dict"):
        vars(alone).pop(name, None)
    return copy.deepcopy(alone, {id(trainer): None, id(module): None})  # memo: references to these become None


def _epochs_again(trainer: L.Trainer) -> int:
    """Return the number of epochs of the run, for schedules that use it; at least two."""
    epochs = trainer.max_epochs
    if epochs is None or 0 <= epochs < _TO_EPOCH_TWO:
        return _TO_EPOCH_TWO
    return epochs


def _no_callbacks() -> list[L.Callback]:
    return []


def _without_last_words(callback: L.Callback) -> L.Callback:
    """Disable ``on_exception`` of a user's callback, which may send messages; techniques use it to undo changes."""
    if not isinstance(callback, Technique):
        callback.on_exception = say_nothing
    return callback


def _with_loaders(datamodule: L.LightningDataModule, **loaders: object) -> L.LightningDataModule:
    """Copy a datamodule so that a module can still query it, with a few batches as loaders."""
    fresh: Any = copy.copy(datamodule)
    fresh.trainer = None
    for hook in ("prepare_data", "setup", "teardown", "on_exception"):
        setattr(fresh, hook, MethodType(getattr(L.LightningDataModule, hook), fresh))
    fresh.train_dataloader = lambda: loaders["train_dataloaders"]
    fresh.val_dataloader = lambda: loaders["val_dataloaders"] or []
    return fresh
