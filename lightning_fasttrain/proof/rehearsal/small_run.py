"""A small run: a complete and a short window, validation, an epoch's end, a checkpoint, and the first step after it."""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from lightning_fasttrain.core.batch import count_bytes
from lightning_fasttrain.core.device import device_clock, time_ms
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.state.values import DEEPEST, GENERATORS, is_foreign, read_generator
from lightning_fasttrain.proof.verification.digest import Digest, take_digest
from lightning_fasttrain.proof.verification.short_run import EnoughError
from lightning_fasttrain.trial.runs import loss_of

State = dict[str, Any]

_SMALL = 2**20  # bytes: larger tensors among attributes are data
_PLAIN = (bool, int, float, str, type(None))
_LIGHTNINGS = frozenset(vars(L.LightningModule()))  # attributes of every module, such as its logging state


def record_state(trainer: L.Trainer, module: nn.Module) -> State:
    """Record weights, buffers, optimizers, schedules and the step, by path; tensors as digests."""
    state: State = {"global step": trainer.global_step}
    for name, parameter in module.named_parameters():
        state[f"weight {name}"] = take_digest(parameter)
    for name, buffer in module.named_buffers():
        state[f"buffer {name}"] = take_digest(buffer)
    for number, optimizer in enumerate(trainer.optimizers):
        state |= dict(_flatten(f"optimizer {number}", trainer.strategy.optimizer_state(optimizer)))
    for number, config in enumerate(trainer.lr_scheduler_configs):
        state |= dict(_flatten(f"schedule {number}", config.scheduler.state_dict()))
    return state


def persistent_only(state: State, module: nn.Module) -> State:
    """Remove the buffers that are not saved in checkpoints, since they are not in ``state_dict``."""
    saved = set(module.state_dict())
    return {path: value for path, value in state.items() if not path.startswith("buffer ") or path[7:] in saved}


def record_attributes(trainer: L.Trainer, module: nn.Module) -> State:
    """Record what else hangs on the user's callbacks, the module and its submodules, also in containers and objects.

    That is numbers, strings, generators and small tensors.
    """
    state: State = {}
    owners: dict[str, object] = {}
    for callback in trainer.callbacks:
        if not is_foreign(type(callback)):
            owners[type(callback).__name__] = callback
    for name, part in module.named_modules():
        owners[f"{type(module).__name__}{name and '.'}{name}"] = part
    for path, owner in owners.items():
        for name, value in vars(owner).items():
            if name not in _LIGHTNINGS and count_bytes(value) < _SMALL:
                state |= dict(_flatten(f"{path}.{name}", value))
    return state


def _flatten(path: str, value: object, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST or isinstance(value, nn.Module | Dataset):
        return
    if isinstance(value, GENERATORS):
        yield path, _RandomState.of(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _flatten(f"{path}.{key}", part, depth + 1)
    elif isinstance(value, list | tuple | deque):
        for number, part in enumerate(value):
            yield from _flatten(f"{path}[{number}]", part, depth + 1)
    elif isinstance(value, Tensor):
        yield path, take_digest(value)
    elif isinstance(value, _PLAIN):
        yield path, value
    elif not is_foreign(type(value)) and hasattr(value, "__dict__"):
        yield from _flatten(path, vars(value), depth + 1)


class _RandomState(str):
    """The state of a generator, which is compared and not shown."""

    @classmethod
    def of(cls, generator: object) -> "_RandomState":
        with np.printoptions(threshold=sys.maxsize):
            return cls(tree_map_only(Tensor, Tensor.tolist, read_generator(generator)))

    def __repr__(self) -> str:
        return "a random state"


def measure_distance(one: object, other: object) -> float:
    """Return the distance of two values; infinite if it is undefined."""
    if isinstance(one, Digest) and isinstance(other, Digest) and one.shape == other.shape:
        return (one - other).norm()
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(abs(one - other))
    return float("inf")


def measure_size(value: object) -> float:
    """Return the norm of a tensor, or the magnitude of a number."""
    return value.norm() if isinstance(value, Digest) else measure_distance(value, 0.0)


def describe(value: object) -> str:
    """Describe a value in a few words."""
    if not isinstance(value, Digest):
        return repr(value)[:40]
    if value.numel == 1:
        return repr(value.item())
    return f"a tensor of {' × '.join(map(str, value.shape))}"


def describe_change(before: object, after: object) -> str:
    """Describe how a value changed.

    Example:
        >>> import torch
        >>> before, after = take_digest(torch.zeros(3)), take_digest(torch.tensor([0.0, 0.5, 0.0]))
        >>> describe_change(before, after), describe_change(2, 5)
        ('is off by 0.5 in 1 of its 3 values', 'was 2 and is 5')
    """
    changed = f"was {describe(before)} and is {describe(after)}"
    if not isinstance(before, Digest) or not isinstance(after, Digest) or before.numel == 1:
        return changed
    if before.shape != after.shape or before.dtype != after.dtype:
        return changed
    change = before - after
    apart = change.entries.abs()
    # Only few values changed, and none of the sampled ones.
    if not apart.any():
        return f"is off by {change.norm():.2g}"
    seen = "its" if apart.numel() == before.numel else "the sampled"
    return f"is off by {float(apart.max()):.2g} in {int((apart != 0).sum())} of {seen} {apart.numel()} values"


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
        save = partial(trainer.save_checkpoint, saving.path, weights_only=saving.weights_only)
        self.course.save_s = time_ms(trainer.strategy.root_device, save) / 1e3
        if saving.weights_only:
            self.course.loaded = trainer.strategy.load_checkpoint(saving.path)

    def _record(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.course.saved = record_state(trainer, module)
        self.course.saved_attributes = record_attributes(trainer, module)
