"""Run one optimizer step under a trace: in the order of the Trainer, or as a module with manual optimization does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import patch_all, patched
from lightning_fasttrain.data.accumulate_gradients import loss_of
from lightning_fasttrain.data.step_gradients import sum_gradients_in_float32
from lightning_fasttrain.optim import release_gradients_
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.predict.allocation_trace import AllocationTrace
from lightning_fasttrain.technique.declarations import PredictedStep

Forward = Callable[[Any], Any]


def step_as_trainer(
    trace: AllocationTrace, forward: Forward, batch: object, optimizer: Optimizer, planned: PredictedStep
) -> None:
    """Run one optimizer step, in the order of the Trainer or, with several micro-batches, of our accumulation."""
    parts = list(planned.split(batch))
    # Gradients exist from the second micro-batch on, so later ones need no more.
    parts = (parts * min(planned.window, 2))[:2]
    trace.phase = "forward"
    if len(parts) == 1:
        output = forward(batch)
        optimizer.zero_grad()
        trace.phase = "backward"
        _backward(loss_of(output))
    else:
        output = None
        optimizer.zero_grad()
        with sum_gradients_in_float32(parameters_of(optimizer)):
            for number, part in enumerate(parts, start=1):
                trace.phase = "forward"
                with planned.without_reduction() if number < len(parts) else nullcontext():
                    loss = loss_of(forward(part))
                    trace.phase = "backward"
                    _backward(loss)
                # The graph would otherwise still exist beside that of the next micro-batch.
                del loss
    # Gradients of shards, which FSDP2 sets without the hooks of autograd.
    for parameter in parameters_of(optimizer):
        if isinstance(parameter.grad, DTensor):
            trace.mark(parameter.grad, "gradients")
    _update(trace, optimizer, planned)
    if planned.releases:
        release_gradients_(parameters_of(optimizer))


def step_by_itself(
    trace: AllocationTrace, forward: Forward, batch: object, optimizers: Sequence[Optimizer], planned: PredictedStep
) -> None:
    """Run the ``training_step`` of a module with manual optimization, which :func:`lend_optimizers` prepares."""
    if len(list(planned.split(batch))) > 1 or planned.window > 1:
        why = "the module runs backwards and optimizers itself"
        way_out = "Call accumulate_gradients(step, batch, n, backward=self.manual_backward) in its training_step"
        raise ValueError(explain("micro-batches with automatic_optimization=False", why, way_out))
    trace.phase = "forward"
    forward(batch)
    if planned.releases:
        for optimizer in optimizers:
            release_gradients_(parameters_of(optimizer))


@contextmanager
def lend_optimizers(
    net: L.LightningModule,
    trace: AllocationTrace,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[object],
    planned: PredictedStep,
) -> Iterator[None]:
    """Give a module without a Trainer what it calls in manual optimization."""
    lent = [_LentOptimizer(trace, optimizer, planned) for optimizer in optimizers]
    trainer = SimpleNamespace(optimizers=list(optimizers))

    def manual_backward(loss: Tensor, *args: object, **kwargs: object) -> None:
        with _phase(trace, "backward"):
            _backward(loss)

    def toggle_optimizer(optimizer: Any) -> None:
        with patched(net, "_trainer", trainer):
            L.LightningModule.toggle_optimizer(net, getattr(optimizer, "optimizer", optimizer))

    def untoggle_optimizer(optimizer: Any) -> None:
        with patched(net, "_trainer", trainer):
            L.LightningModule.untoggle_optimizer(net, getattr(optimizer, "optimizer", optimizer))

    def clip_gradients(optimizer: Any, gradient_clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        parameters = parameters_of(getattr(optimizer, "optimizer", optimizer))
        if gradient_clip_val and gradient_clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)

    def lr_schedulers() -> Any:
        return _as_lightning_gives(schedulers)

    def lent_optimizers(use_pl_optimizer: bool = True) -> Any:
        return _as_lightning_gives(lent)

    methods = (manual_backward, toggle_optimizer, untoggle_optimizer, clip_gradients, lr_schedulers)
    lends = {method.__name__: method for method in methods}
    restore = patch_all(net, {**lends, "optimizers": lent_optimizers})
    try:
        yield
    finally:
        restore()


def _as_lightning_gives(things: Sequence[object]) -> Any:
    """Return the only one of them alone, several as a list, and None for none."""
    if len(things) == 1:
        return things[0]
    return list(things) or None


class _LentOptimizer:
    """Stands for Lightning's wrapper of an optimizer."""

    def __init__(self, trace: AllocationTrace, optimizer: Optimizer, planned: PredictedStep) -> None:
        self.optimizer = optimizer
        self._trace, self._planned = trace, planned

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], object] | None = None, **kwargs: object) -> None:
        if closure is not None:
            closure()
        with _phase(self._trace, self._trace.phase):
            _update(self._trace, self.optimizer, self._planned)


@contextmanager
def _phase(trace: AllocationTrace, name: str) -> Iterator[None]:
    before = trace.phase
    trace.phase = name
    yield
    trace.phase = before


def _update(trace: AllocationTrace, optimizer: Optimizer, planned: PredictedStep) -> None:
    trace.phase = "optimizer step"
    # A step in host memory takes no device memory.
    if not (planned.on_cuda and isinstance(optimizer, HostOptimizer)):
        optimizer.step()


def _backward(loss: Tensor) -> None:
    """Call backward without ``loss.backward()``, which ``AsOnCuda`` would treat as one opaque function."""
    root = torch.ones_like(loss)
    _engine_run_backward((loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True)
