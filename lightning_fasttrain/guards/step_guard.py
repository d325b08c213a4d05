"""Decide before each step of an optimizer whether to skip it; a skipped step changes nothing.

The decision is made on the device. Torch's fused optimizers read it there, as they read a loss scaler's: their update
is launched first and does nothing if the step is skipped, and the host reads the decision during the update. All other
optimizers must be kept from stepping, so for them the host waits for the backward.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_fasttrain.core.checks import PositiveInt
from lightning_fasttrain.core.device import AsyncReading
from lightning_fasttrain.core.distributed import gather_values, rank_count
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.host.optimizer_steps import (
    gradient_device,
    is_deepspeed,
    own_shard,
    refuse_unguardable,
    skip_step,
    unwrap_optimizer,
)
from lightning_fasttrain.core.messages import explain, number_of, warn
from lightning_fasttrain.core.modules.parameters import parameters_of, values_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, undo_all
from lightning_fasttrain.technique import Capability, Conflict, Technique


class JudgedSteps:
    """Counts the steps that a subclass judges to be bad, warns of each, and raises after several in a row.

    Attributes:
        losses: what is known of the losses of the coming step: tensors and plain values.
        skipped: number of skipped steps so far.
        in_a_row: number of skipped steps since the last good one.
        skipped_now: whether a step was skipped since this was last set to False.
        where: describes the place of a bad step for the message; set by whoever knows it.
    """

    failure: ClassVar[type[Exception]]
    persists: ClassVar[str]  # why several bad steps in a row are an error
    way_out: ClassVar[str]

    def __init__(self, stop_after: PositiveInt) -> None:
        self.stop_after = stop_after
        self.losses: list[Any] = []
        self.skipped = self.in_a_row = 0
        self.skipped_now = False
        self.where: Callable[[], str] = lambda: ""

    def count_skip(self, what: str) -> None:
        """Count a bad step.

        Args:
            what: description of the bad step, for the message.
        """
        self.skipped += 1
        self.in_a_row += 1
        self.skipped_now = True
        what = f"a step was skipped{what}"
        if self.in_a_row < self.stop_after:
            warn(f"{what} (skipped so far: {self.skipped}).")
            return
        why = f"that is {number_of(self.in_a_row, 'step')} in a row, so {self.persists}"
        raise self.failure(explain(what, why, self.way_out))

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]


def hold_schedules_(trainer: L.Trainer, module: L.LightningModule, was_skipped: Callable[[], bool]) -> Undo:
    """Skip per-step schedules where ``was_skipped``; per-epoch schedules are not affected. Return how to undo it."""
    own = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: LRSchedulerTypeUnion, metric: object) -> None:
        by_step = any(one.scheduler is scheduler and one.interval == "step" for one in trainer.lr_scheduler_configs)
        if not (by_step and was_skipped()):
            own(scheduler, metric)

    return patch(module, "lr_scheduler_step", lr_scheduler_step)


Look = Callable[[Optimizer], Tensor]
Tell = Callable[[list[float]], None]


def hold_steps_(optimizer: Optimizer, look: Look, tell: Tell, scaler: GradScaler | None = None) -> Undo:
    """Let ``look`` decide on each step of ``optimizer``, and report the decision to ``tell``.

    A skipped step changes neither weights nor state, and no hooks of the optimizer run. If torch's fused optimizers
    skip on the device, their hooks do run.

    Args:
        optimizer: one of torch or DeepSpeed, or Lightning's or Fabric's wrapper of one.
        look: optimizer → [n] float32 on the device, the same on all ranks; the step is skipped if the first is 1.
        tell: called with these n values once per step: after a step that was made, before one that is skipped.
        scaler: a loss scaler, which skips steps itself; these are reported to ``tell`` too.

    Returns:
        How to undo it.

    Raises:
        TypeError: not an optimizer, one that runs the backward several times per step, or one of DeepSpeed's with a
            loss scaler.
    """
    optimizer = unwrap_optimizer(optimizer)
    if is_deepspeed(optimizer):
        refuse_unguardable(optimizer)
    if isinstance(optimizer, LBFGS):
        why = "it calls its closure several times per step, and a guard supports one update per step"
        raise TypeError(explain("optimizer=LBFGS", why, "Use, for example, AdamW"))
    return _Gate(optimizer, look, tell).install(scaler)


class _Gate:
    """Replacement for an optimizer's ``step``."""

    def __init__(self, optimizer: Optimizer, look: Look, tell: Tell) -> None:
        self.optimizer: Any = optimizer
        self.look, self.tell = look, tell
        self.own_step: Any = optimizer.step
        self.passed = False

    def install(self, scaler: GradScaler | None) -> Undo:
        @functools.wraps(self.own_step)  # schedules look for their marker on it
        def step(_: Optimizer, closure: Callable[[], object] | None = None, **kwargs: object) -> Any:
            return self.step(closure, **kwargs)

        # a method, since schedules that are created later use its __func__
        restore_step = patch(self.optimizer, "step", MethodType(step, self.optimizer))
        if scaler is None:
            return restore_step
        own = scaler.step

        def scaled_step(optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
            # A scaler that finds infinity does not call optimizer.step.
            self.passed = False
            result = own(optimizer, *args, **kwargs)
            if optimizer is self.optimizer and not self.passed:
                self.tell(AsyncReading(self.look(optimizer)).wait())
            return result

        return undo_all([restore_step, patch(scaler, "step", scaled_step)])

    # The closure runs forward and backward, so the gradients exist only after it; the optimizer is called without it.
    def step(self, closure: Callable[[], object] | None = None, **kwargs: object) -> Any:
        self.passed = True
        loss = None
        if closure is not None:
            # As torch's optimizers do, since a step may be called under no_grad.
            with torch.enable_grad():
                loss = closure()
        numbers = self.look(self.optimizer)
        if is_deepspeed(self.optimizer):
            self.optimizer.overflow = False  # of an earlier step; releases before 0.19 do not reset it
        reading = AsyncReading(numbers)
        if skips_on_device(self.optimizer):
            with _told_on_device(self.optimizer, numbers[0]):
                self.own_step(**kwargs)
            self.tell(reading.wait())
            return loss
        values = reading.wait()
        if values[0] == 0:
            self.own_step(**kwargs)
        self.tell(values)
        # DeepSpeed holds the gradients itself, and its engine must know that the step was skipped.
        if values[0] != 0 and is_deepspeed(self.optimizer):
            skip_step(self.optimizer)
        return loss


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the device alone can skip the coming step.

    Only with torch's own optimizers, and not in their first step, in which fused SGD creates uninitialized buffers.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if not fused or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    return all(optimizer.state.get(parameter) for parameter in parameters_with_gradient(optimizer))


@contextmanager
def _told_on_device(optimizer: Optimizer, skip: Tensor) -> Iterator[None]:
    """Pass ``skip`` to a fused optimizer as a loss scaler does; with a scaler, both are respected."""
    # The attributes that torch's fused optimizers read in step().
    scalers = getattr(optimizer, "found_inf", None)
    if scalers is not None:
        skip = torch.maximum(skip, scalers)
    given = {"found_inf": skip, "grad_scale": getattr(optimizer, "grad_scale", None)}
    before = {name: vars(optimizer)[name] for name in given if name in vars(optimizer)}
    vars(optimizer).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(optimizer)[name]
        vars(optimizer).update(before)


def parameters_with_gradient(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that the coming step would change."""
    return [p for p in parameters_of(optimizer) if p.grad is not None]


def device_of(optimizer: Optimizer) -> torch.device:
    """Return the device of its parameters, also on a rank without gradients, which still takes part in collectives."""
    if is_deepspeed(optimizer):
        return gradient_device(optimizer)
    return parameters_of(optimizer)[0].device


def has_unfinite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether the local values contain NaN or infinity: a 0-d float32 of 0 or 1, on the device.

    Example:
        >>> has_unfinite([torch.ones(2), torch.tensor([1.0, float("inf")])])
        tensor(1.)
    """
    shards = [shard for shard in map(local_values, tensors) if shard.numel() > 0]  # an empty shard has no maximum
    largest = torch.nn.utils.get_total_norm(shards, norm_type=float("inf"))
    return (largest < torch.inf).logical_not().float()  # a norm is never negative, and NaN is not below infinity


def has_room_for_nan(tensor: Tensor) -> bool:
    """Whether it holds floating-point values; one-byte tensors hold codes, with scales elsewhere."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def local_values(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, the values of a sparse one, and others unchanged."""
    if hasattr(tensor, "ds_tensor"):
        return own_shard(tensor)
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return values_of(tensor)


def agree(number: Tensor) -> Tensor:
    """Return the maximum over all ranks. It is part of the step's own communication: the host does not wait for it."""
    if rank_count() > 1:
        # In place and in the order of the step: all ranks reach it, since each of them steps.
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number


class StepGuard(Technique):
    """Skips steps that its :class:`JudgedSteps` find bad, and the per-step schedules with them."""

    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        early = "weights are updated during the backward, before all gradients are known"
        return (
            Conflict(Capability.UPDATES_IN_BACKWARD, early, "Use only one of them"),
            Conflict(
                DeepSpeedStrategy,
                "DeepSpeed's engine decides by itself when an accumulation window ends",
                "Use ZeROStrategy, FSDP2Strategy or DDP",
                lambda guard, strategy: strategy.handles_gradient_accumulation,
            ),
        )

    def __init__(self, steps: JudgedSteps) -> None:
        self.steps = steps
        self._batch_idx = 0
        self._run = ExitStack()

    @property
    def skipped(self) -> int:
        """Number of skipped steps so far."""
        return self.steps.skipped

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        self._run = ExitStack()
        if trainer.state.fn == "fit":
            self._watch_saves(trainer, pl_module)
        return self._run.close

    def _watch_saves(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Patch how this run's checkpoints are saved."""

    def _guard(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer) -> Undo:
        """Guard one optimizer."""
        raise NotImplementedError

    def _locate(self, trainer: L.Trainer, module: L.LightningModule) -> str:
        """Describe where a bad step was, for the message."""
        return f"; epoch {trainer.current_epoch}, batch {self._batch_idx}"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the first at which an optimizer exists."""
        self.steps.where = lambda: self._locate(trainer, pl_module)
        self._run.callback(self._forget)
        for optimizer in trainer.optimizers:
            self._run.callback(self._guard(trainer, pl_module, optimizer))
        self._run.callback(hold_schedules_(trainer, pl_module, lambda: self.steps.skipped_now))

    def _forget(self) -> None:
        """Release what the steps hold of the run."""
        self.steps.where = lambda: ""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: record the index of the batch for messages."""
        self._batch_idx = batch_idx
        self.steps.skipped_now = False

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: inside an accumulation window, the next step is judged by losses that each rank has seen before."""
        failed = trainer.interrupted and trainer.world_size > 1  # the other ranks may not answer
        if trainer.state.fn == "fit" and accumulation_continues(trainer) and not failed:
            losses = gather_values(self.steps.losses, trainer.strategy.root_device)
            checkpoint[type(self).__name__] = {"losses": losses}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: the losses of the window that is resumed."""
        losses = checkpoint.get(type(self).__name__, {}).get("losses", [])
        # With another number of ranks each would have other batches.
        if len(losses) == trainer.world_size:
            self.steps.losses = list(losses[trainer.global_rank])

    def outcome(self, model: nn.Module) -> str:
        return f"skipped {number_of(self.skipped, 'step')}" if self.skipped else ""

    def state_dict(self) -> dict[str, Any]:
        return self.steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps.load_state_dict(state_dict)
