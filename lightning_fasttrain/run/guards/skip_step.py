"""Decide before each step of an optimizer whether to skip it; a skipped step changes nothing.

The decision is made on the device. Torch's fused optimizers read it there, as they read a loss scaler's: their update
is launched first and does nothing if the step is skipped, and the host reads the decision during the update. All other
optimizers must be kept from stepping, so for them the host waits for the backward.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.host.lightning import FabricOptimizer
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


def hold_schedules_(trainer: L.Trainer, module: L.LightningModule, was_skipped: Callable[[], bool]) -> Undo:
    """Skip per-step schedules where ``was_skipped``; per-epoch schedules are not affected. Return how to undo it."""
    own = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: LRSchedulerTypeUnion, metric: Any) -> None:
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
        optimizer: a torch optimizer, or Lightning's or Fabric's wrapper of one.
        look: optimizer → [n] float32 on the device, the same on all ranks; the step is skipped if the first is 1.
        tell: called with these n values once per step: after a step that was made, before one that is skipped.
        scaler: a loss scaler, which skips steps itself; these are reported to ``tell`` too.

    Returns:
        How to undo it.

    Raises:
        TypeError: not a torch optimizer, or one that runs the backward several times per step.
    """
    if isinstance(optimizer, FabricOptimizer | LightningOptimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
        # LBFGS calls its closure several times per step.
        why = "a guard supports a torch.optim.Optimizer with one update per step"
        raise TypeError(explain(f"optimizer={type(optimizer).__name__}", why, "Use, for example, AdamW"))
    return _Gate(optimizer, look, tell).install(scaler)


class _Gate:
    """Replacement for an optimizer's ``step``."""

    def __init__(self, optimizer: Optimizer, look: Look, tell: Tell) -> None:
        self.optimizer, self.look, self.tell = optimizer, look, tell
        self.own_step: Any = optimizer.step
        self.passed = False

    def install(self, scaler: GradScaler | None) -> Undo:
        @functools.wraps(self.own_step)  # schedules look for their marker on it
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self.step(closure, **kwargs)

        undo = ExitStack()
        # a method, since schedules that are created later use its __func__
        undo.callback(patch(self.optimizer, "step", MethodType(step, self.optimizer)))
        if scaler is not None:
            own = scaler.step

            def scaled_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                self.passed = False  # a scaler that finds infinity does not call optimizer.step
                result = own(optimizer, *args, **kwargs)
                if optimizer is self.optimizer and not self.passed:
                    self.tell(_Reading(self.look(optimizer)).wait())
                return result

            undo.callback(patch(scaler, "step", scaled_step))
        return undo.close

    # The closure runs forward and backward, so the gradients exist only after it; the optimizer is called without it.
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        self.passed = True
        loss = None
        if closure is not None:
            with torch.enable_grad():  # as torch's optimizers do: a step may be called under no_grad
                loss = closure()
        numbers = self.look(self.optimizer)
        reading = _Reading(numbers)
        if skips_on_device(self.optimizer):
            with _told_on_device(self.optimizer, numbers[0]):
                self.own_step(**kwargs)
            self.tell(reading.wait())
            return loss
        values = reading.wait()
        if values[0] == 0:
            self.own_step(**kwargs)
        self.tell(values)
        return loss


class _Reading:
    """Asynchronous copy of values from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.event = numbers, None
        if numbers.is_cuda:
            # Pinned: otherwise the copy would wait for the device.
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            # An event, so that the host waits only for this copy, not for the update that is launched after it.
            self.event = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.tolist()


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the device alone can skip the coming step.

    Only with torch's own optimizers, and not in their first step, in which fused SGD creates uninitialized buffers.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if not fused or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    return all(optimizer.state.get(parameter) for parameter in parameters_with_gradient(optimizer))


@contextmanager
def _told_on_device(optimizer: Any, skip: Tensor) -> Iterator[None]:
    """Pass ``skip`` to a fused optimizer as a loss scaler does; with a scaler, both are respected."""
    scalers = getattr(optimizer, "found_inf", None)
    restore = ExitStack()
    # The attributes that torch's fused optimizers read in step().
    restore.callback(patch(optimizer, "found_inf", skip if scalers is None else torch.maximum(skip, scalers)))
    if scalers is None:
        restore.callback(patch(optimizer, "grad_scale", None))
    with restore:
        yield


def parameters_with_gradient(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that the coming step would change."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def device_of(optimizer: Optimizer) -> torch.device:
    """Return the device of its parameters, also on a rank without gradients, which still takes part in collectives."""
    return next(parameter for group in optimizer.param_groups for parameter in group["params"]).device


def has_unfinite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether the local values contain NaN or infinity: a 0-d float32 of 0 or 1, on the device.

    Example:
        >>> has_unfinite([torch.ones(2), torch.tensor([1.0, float("inf")])])
        tensor(1.)
    """
    shards = [shard for shard in map(local_values, tensors) if shard.numel() > 0]  # an empty shard has no maximum
    largest = torch.nn.utils.get_total_norm(shards, norm_type=float("inf"))
    return (~largest.isfinite()).float()


def has_room_for_nan(tensor: Tensor) -> bool:
    """Whether it holds floating-point values; one-byte tensors hold codes, with scales elsewhere."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def local_values(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, the values of a sparse one, and others unchanged."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def agree(number: Tensor) -> Tensor:
    """Return the maximum over all ranks. It is part of the step's own communication: the host does not wait for it."""
    if rank_count() > 1:
        # In place and in the order of the step: all ranks reach it, since each of them steps.
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number
