"""Losses that parts of a model compute in their forward, and their gradient beside that of the step's loss."""

import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch import loss_in, with_loss
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, patch, wrappers_on
from lightning_fasttrain.technique import Capability, Conflict


class PendingLosses:
    """The losses of the forwards since they were last taken, each multiplied by its weight."""

    def __init__(self) -> None:
        self.losses: list[Any] = []  # tensors, or weak references to them

    def add(self, loss: Tensor, output: Tensor) -> Tensor:
        """Keep the loss of a forward as long as the graph of its ``output`` lives, and return the output.

        So a loop that never takes the losses does not collect them. A recomputation in the backward, which comes too
        late, is not counted.
        """
        if torch.compiler.is_compiling():
            self.losses = [loss]  # compiled code has no weak references
            return output
        if torch._C._current_graph_task_id() != -1:
            return output
        self.losses = [reference for reference in self.losses if _resolve(reference) is not None]
        self.losses.append(weakref.ref(loss))
        return _KeepAlive.apply(output, [loss])

    def take(self) -> list[Tensor]:
        taken, self.losses = list(map(_resolve, self.losses)), []
        return [loss for loss in taken if loss is not None]

    def __deepcopy__(self, memo: object) -> "PendingLosses":
        return PendingLosses()  # a graph cannot be copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PendingLosses, ()


def _resolve(loss: Any) -> Tensor | None:
    if isinstance(loss, Tensor):
        return loss
    return loss()


class _KeepAlive(torch.autograd.Function):
    """The identity, whose node in the graph holds further tensors."""

    @staticmethod
    def forward(ctx: object, output: Tensor, held: list[Tensor]) -> Tensor:  # type: ignore[override]
        ctx.held = held
        return output.view_as(output)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class ForwardWithLoss(WrappedForward):
    """Base of replaced forwards that compute a loss of their own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.pending = PendingLosses()


class ModuleWithLoss(nn.Module):
    """Base of modules that compute a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = PendingLosses()


def _take_all(model: nn.Module) -> list[Tensor]:
    losses: list[Tensor] = []
    for module in model.modules():
        holders: list[Any] = [*wrappers_on(module, ForwardWithLoss)]
        if isinstance(module, ModuleWithLoss):
            holders.append(module)
        for holder in holders:
            losses += holder.pending.take()
    return losses


@check_arguments
def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum of the losses that parts of ``model`` have computed since the last call, and forget them.

    These are the balance and z-losses of :func:`upcycle_`'s routers, and those of :func:`mixture_of_depths_`'s
    predictors, each multiplied by its weight. The sum is on the graph of the forward, and zero if there are none. Call
    it once after each forward in training: ``loss = loss + auxiliary_loss(model)``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> auxiliary_loss(net)
        tensor(0.)

    Source:
        Hugging Face's ``MixtralForCausalLM`` adds its ``aux_loss`` to the loss in the same way.
    """
    losses = _take_all(model)
    if not losses:
        return torch.zeros((), device=next(model.parameters(), torch.empty(0)).device)
    return _sum_on(losses[0].device, losses)


def _sum_on(device: torch.device, losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.float().to(device) for loss in losses]).sum()


@check_arguments
def add_auxiliary_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """Return ``loss`` with an unchanged value, and with the gradient of ``loss + auxiliary_loss(model)``.

    The gradient is multiplied by whatever ``loss`` is multiplied by later, such as the scale of float16 and the number
    of accumulated batches. Techniques call it on what ``training_step`` returns; call it in a bare or Fabric loop.

    Args:
        loss: a scalar, of a forward of ``model``.
        model: the model with the losses.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> loss = net(torch.ones(3, 2)).square().mean()
        >>> bool(add_auxiliary_gradient(loss, net) == loss)
        True

    Source:
        Megatron-LM's ``MoEAuxLossAutoScaler``, which adds the gradient at the experts' output instead, so that the
        scale has to be set by hand.
    """
    losses = _take_all(model)
    if not losses:
        return loss
    return _WithGradient.apply(loss, _sum_on(loss.device, losses))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, loss: Tensor, auxiliary: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kind = auxiliary.dtype
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.to(ctx.kind)


class StepWithLosses:
    """A ``training_step`` whose loss has the gradient of the model's auxiliary losses too.

    An object rather than a closure, so that a copy of a model with this step trains the copy and not the original.
    """

    def __init__(self, model: nn.Module, step: Callable[..., object]) -> None:
        # inspect reads the signature from this name.
        self.model, self.__wrapped__ = model, step

    def __call__(self, *args: object, **kwargs: object) -> Any:
        _take_all(self.model)  # of forwards that were not trained on
        output = self.__wrapped__(*args, **kwargs)
        if output is None:  # the step is skipped
            return None
        loss = loss_in(output, "the gradient of auxiliary losses is added to its own")
        return with_loss(output, add_auxiliary_gradient(loss, self.model))


def conflicts_of_losses(way_out: str, has_losses: Callable[[Any], bool]) -> tuple[Conflict, ...]:
    """Return the conflicts of a technique whose losses are means over the tokens of one forward.

    Args:
        way_out: how to do without these losses.
        has_losses: whether the technique has them, as it is set.
    """
    why = "its own loss is a mean over all tokens of a batch, which is not the sum of those of its micro-batches"
    accepted = "or accept that with check=False"

    def splits(technique: object, other: object) -> bool:
        return has_losses(technique) and getattr(other, "check", True)

    return (
        Conflict(Capability.SPLITS_BATCHES, why, f"{way_out}, {accepted}", splits),
        Conflict(Capability.SUMS_BATCHES, why, f"{way_out}, {accepted}", splits),
    )


def train_auxiliary_losses_(trainer: L.Trainer, module: L.LightningModule, technique: str) -> Undo | None:
    """Add the gradient of auxiliary losses to each training step of a Trainer, until the returned function is called.

    Raises:
        ValueError: with manual optimization, ``training_step`` calls the backward by itself.
    """
    if trainer.state.fn != "fit":
        return None
    if not module.automatic_optimization:
        why = "the loss that training_step returns is not the one that is trained on"
        way_out = "Call architecture.add_auxiliary_gradient(loss, self) before manual_backward, and pass "
        way_out += "a technique without losses of its own"
        raise ValueError(explain(f"{technique} with automatic_optimization=False", why, way_out))
    return patch(module, "training_step", StepWithLosses(module, module.training_step))
