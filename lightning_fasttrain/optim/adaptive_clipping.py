"""Adaptive gradient clipping: each unit's gradient is kept small beside the unit's weights."""

from collections.abc import Iterable
from typing import ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.optim.optimizer_in_backward import OptimizerInBackward
from lightning_fasttrain.technique import Conflict, Exactness, Technique


@torch.no_grad()
def clip_adaptively_(parameters: Iterable[Tensor], factor: float = 0.01, eps: float = 1e-3) -> int:
    """Scale down the gradient of each unit whose norm is above ``factor`` times that of its weights.

    For unit i, a row of a matrix or a filter of a convolution:
    g_i ← g_i · min(1, factor · max(‖w_i‖, eps) / ‖g_i‖). A vector, such as a bias, is one unit.

    Call it after the backward and before ``optimizer.step()``. Embeddings and the last layer are better left out.

    Args:
        parameters: those without a gradient are left alone.
        factor: largest ‖g_i‖ / ‖w_i‖, positive.
        eps: what the norm of weights is at least, so that those that begin at zero can move.

    Returns:
        How many gradients were looked at.

    Raises:
        ValueError: ``factor`` or ``eps`` is not positive; a gradient that is sparse in more than its rows.

    Example:
        >>> weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> weight.grad = torch.tensor([[6.0, 8.0], [0.0, 0.005]])
        >>> clip_adaptively_([weight])
        1
        >>> weight.grad
        tensor([[0.0300, 0.0400],
                [0.0000, 0.0050]])

    Source:
        Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization", equation 3.
    """
    _refuse_not_positive(factor=factor, eps=eps)
    count = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        count += 1
        weight: Tensor = parameter
        if gradient.is_sparse:  # an embedding's: the rows that were looked up
            gradient = parameter.grad = gradient.coalesce()
            weight, gradient = _rows_of(parameter, gradient), gradient.values()
        largest = factor * _unit_norms(weight).clamp(min=eps)
        norms = _unit_norms(gradient)
        # where the gradient is zero the quotient is infinite, and 1 is the smaller
        gradient.mul_((largest / norms).clamp(max=1.0).to(gradient.dtype))
    return count


def _rows_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The weights of those units that a sparse gradient, coalesced, is of."""
    if gradient.sparse_dim() != 1:
        what = f"a gradient of shape {tuple(gradient.shape)} that is sparse in {gradient.sparse_dim()} dimensions"
        why = "it holds parts of units, and a unit is clipped as a whole"
        raise ValueError(explain(what, why, "Leave this parameter out, or make its gradient dense"))
    return parameter[gradient.indices()[0]]


def _unit_norms(tensor: Tensor) -> Tensor:
    """[units, 1, ...]; of a vector or a number [1]."""
    axes = list(range(1, tensor.ndim)) if tensor.ndim > 1 else None  # None: all of them
    return torch.linalg.vector_norm(tensor, dim=axes, keepdim=True, dtype=torch.float32)


def _refuse_not_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            way_out = f"Use {name}=0.01" if name == "factor" else f"Use {name}=1e-3"
            raise ValueError(explain(f"{name}={number}", "nothing would be left of the gradients", way_out))


class AdaptiveClipping(Technique):
    """Clip each unit's gradient by the norm of its own weights, instead of all by their common norm.

    Acts in ``on_before_optimizer_step``, when gradients are summed, averaged and unscaled; clipping by the Trainer
    comes after it.

    Args:
        factor, eps: as for :func:`~lightning_fasttrain.optim.clip_adaptively_`.
        leave_out: modules whose own parameters are not clipped, by name: ``["head"]``. Embeddings never are.

    Raises:
        ValueError: ``factor`` or ``eps`` is not positive; in ``fit``: a module that the model lacks, or a fused
            optimizer with a loss scaler.

    Example:
        >>> clipping = AdaptiveClipping(0.01, leave_out=["head"])

    Source:
        See :func:`~lightning_fasttrain.optim.clip_adaptively_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    effect: ClassVar[str] = "each unit's gradient is clipped by the norm of its weights"
    when: ClassVar[str] = "large batches or learning rates, nets without normalisation; not beside clipping by norm"
    in_a_loop: ClassVar[str] = "optim.clip_adaptively_(parameters)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        gone = "gradients are used and freed during the backward"
        engine = "DeepSpeed's engine holds the gradients"
        return (
            Conflict(OptimizerInBackward, gone, "Use OptimizerInBackward(clip_norm=...)"),
            Conflict(DeepSpeedStrategy, engine, "Use FSDP2 or DDP"),
        )

    def __init__(self, factor: float = 0.01, eps: float = 1e-3, leave_out: Iterable[str] = ()) -> None:
        _refuse_not_positive(factor=factor, eps=eps)
        self.factor, self.eps = factor, eps
        self.leave_out = [leave_out] if isinstance(leave_out, str) else list(leave_out)
        self._parameters: list[Tensor] = []

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        return self._parameters.clear  # or the technique would keep the model in memory after the run

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: model and optimizers are there."""
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if scaled and any(group.get("fused") for group in trainer.optimizers[0].param_groups):
            why = "it undoes the scaling of gradients inside its step, so they are too large here"
            raise ValueError(explain("AdaptiveClipping with a fused optimizer in float16", why, "Use fused=False"))
        self._parameters = _parameters_of(pl_module, self.leave_out)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: the gradients are as the optimizer would take them."""
        clip_adaptively_(self._parameters, self.factor, self.eps)


def _parameters_of(model: nn.Module, leave_out: Iterable[str]) -> list[Tensor]:
    modules = dict(model.named_modules())
    for name in leave_out:
        if name not in modules:
            known = ", ".join(child for child, _ in model.named_children())
            way_out = f"Name one, such as {known}"
            raise ValueError(explain(f"leave_out={name!r}", f"{type(model).__name__} has no such module", way_out))
    left_out: set[Tensor] = set()
    for name, module in modules.items():
        if name in leave_out or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            left_out.update(module.parameters())
    return [parameter for parameter in model.parameters() if parameter not in left_out]
