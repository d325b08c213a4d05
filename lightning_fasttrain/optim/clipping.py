"""Clip gradients relative to the weights of each unit, clip weights, and let fused optimizers clip under autocast."""

from collections.abc import Iterable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.parameters import parameters_of_kinds
from lightning_fasttrain.core.modules.select import as_list, find_module
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Technique
from lightning_fasttrain.technique.declarations import Facts


@check_arguments
@torch.no_grad()
def clip_adaptively_(parameters: Iterable[Tensor], factor: PositiveFloat = 0.01, eps: PositiveFloat = 1e-3) -> int:
    """Scale down the gradient of each unit whose norm is above ``factor`` times that of its weights.

    For unit i, a row of a matrix or a filter of a convolution:
    g_i ← g_i · min(1, factor · max(‖w_i‖, eps) / ‖g_i‖). A vector, such as a bias, is one unit.

    Call it after the backward and before ``optimizer.step()``. Exclude embeddings and the last layer.

    Args:
        parameters: parameters to clip; those without a gradient are skipped.
        factor: largest ‖g_i‖ / ‖w_i‖, positive.
        eps: lower bound of the norm of weights, so that weights initialized to zero can change.

    Returns:
        The number of gradients that were processed.

    Raises:
        ValueError: ``factor`` or ``eps`` is not positive; a gradient is sparse in more than its rows.

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
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        weight: Tensor = parameter
        # The sparse gradient of an embedding holds only the rows that were looked up.
        if gradient.is_sparse:
            gradient = parameter.grad = gradient.coalesce()
            weight, gradient = _rows_of(parameter, gradient), gradient.values()
        weights.append(weight)
        gradients.append(gradient)
    if not gradients:
        return 0
    # For all at once: a kernel for each small parameter takes longer to launch than to run.
    # Not in place, since norms over shards are not reduced before they are used.
    largest = torch._foreach_mul(torch._foreach_clamp_min(_unit_norms(weights), eps), factor)
    # If the gradient is zero the quotient is infinite, and 1 is the minimum.
    factors = torch._foreach_clamp_max(torch._foreach_div(largest, _unit_norms(gradients)), 1.0)
    for gradient, allowed in zip(gradients, factors, strict=True):
        # A parameter without a dimension is not sharded, though all others are.
        if isinstance(allowed, DTensor) and not isinstance(gradient, DTensor):
            allowed = allowed.full_tensor()
        gradient.mul_(allowed.to(gradient.dtype))
    return len(gradients)


def _rows_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the weights of the units that a coalesced sparse gradient belongs to."""
    if gradient.sparse_dim() != 1:
        what = f"a gradient of shape {tuple(gradient.shape)} that is sparse in {gradient.sparse_dim()} dimensions"
        why = "it holds parts of units, and a unit is clipped as one"
        raise ValueError(explain(what, why, "Exclude this parameter, or make its gradient dense"))
    return parameter[gradient.indices()[0]]


def _unit_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norms of each tensor's units, of shape [units, 1, ...]; a scalar for a vector or a scalar."""
    # At least in float32, since a sum of squares in float16 overflows from a norm of 256 on.
    dtype = torch.float32
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        dtype = torch.float64
    # Cast beforehand, since DTensor of torch 2.15 takes the argument `dtype` for a dimension.
    vectors = [tensor.to(dtype) for tensor in tensors if tensor.ndim < 2]
    of_vectors = iter(torch._foreach_norm(vectors) if vectors else ())
    norms: list[Tensor] = []
    for tensor in tensors:
        if tensor.ndim < 2:
            norms.append(next(of_vectors))
        else:
            axes = list(range(1, tensor.ndim))
            norms.append(torch.linalg.vector_norm(tensor, dim=axes, keepdim=True, dtype=dtype))
    return norms


class AdaptiveClipping(Technique):
    """Clip each unit's gradient by the norm of its own weights, instead of the global norm.

    Acts in ``on_before_optimizer_step``, when gradients are summed, averaged and unscaled; clipping by the Trainer
    follows it.

    Args:
        factor, eps: as for :func:`~lightning_fasttrain.optim.clip_adaptively_`.
        leave_out: names of modules whose own parameters are not clipped: ``["head"]``. Embeddings never are.

    Raises:
        ValueError: ``factor`` or ``eps`` is not positive; in ``fit``: the model has no such module, or a fused
            optimizer is used with a loss scaler.

    Example:
        >>> clipping = AdaptiveClipping(0.01, leave_out=["head"])

    Source:
        See :func:`~lightning_fasttrain.optim.clip_adaptively_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    effect: ClassVar[str] = "each unit's gradient is clipped by the norm of its weights"
    when: ClassVar[str] = "batches or learning rates are large, without normalization layers; not with clipping by norm"
    in_a_loop: ClassVar[str] = "optim.clip_adaptively_(parameters)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        gone = "gradients are used and freed during the backward"
        engine = "DeepSpeed's engine holds the gradients"
        return (
            Conflict(Capability.UPDATES_IN_BACKWARD, gone, "Use OptimizerInBackward(clip_norm=...)"),
            Conflict(DeepSpeedStrategy, engine, "Use FSDP2 or DDP"),
        )

    def __init__(
        self, factor: PositiveFloat = 0.01, eps: PositiveFloat = 1e-3, leave_out: str | Iterable[str] = ()
    ) -> None:
        self.factor, self.eps = factor, eps
        self.leave_out = as_list(leave_out)
        self._parameters: list[Tensor] = []

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        return self._parameters.clear  # releases the model after the run

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called when model and optimizers exist."""
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if scaled and any(group.get("fused") for group in trainer.optimizers[0].param_groups):
            why = "such an optimizer unscales gradients inside its step, so they are too large here"
            raise ValueError(explain("AdaptiveClipping with a fused optimizer in float16", why, "Use fused=False"))
        self._parameters = _parameters_of(pl_module, self.leave_out)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: called when the gradients are final, right before the optimizer uses them."""
        clip_adaptively_(self._parameters, self.factor, self.eps)


def _parameters_of(model: nn.Module, leave_out: Iterable[str]) -> list[Tensor]:
    left_out = parameters_of_kinds(model, nn.Embedding, nn.EmbeddingBag)
    for name in leave_out:
        left_out.update(find_module(model, name, "leave_out").parameters())
    return [parameter for parameter in model.parameters() if parameter not in left_out]


@check_arguments
@torch.no_grad()
def clip_weights_(parameters: Iterable[Tensor], limit: PositiveFloat) -> int:
    """Clamp every entry of the trainable parameters to [−limit, limit]; call it after ``optimizer.step()``.

    Args:
        parameters: parameters of a model or submodule; frozen ones are skipped.
        limit: largest absolute value, positive.

    Returns:
        The number of parameters that were processed.

    Raises:
        ValueError: ``limit`` is not positive, or no parameter is trainable.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.5, -2.0]))
        >>> clip_weights_([weight], limit=1.0), weight.tolist()
        (1, [0.5, -1.0])

    Source:
        Arjovsky et al. 2017, "Wasserstein GAN", algorithm 1.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(explain("clip_weights_", "none of the parameters is trainable", "Pass trainable parameters"))
    # For all at once: a kernel for each small parameter would take longer to launch than to run.
    torch._foreach_clamp_min_(trained, -limit)
    torch._foreach_clamp_max_(trained, limit)
    return len(trained)


class WeightClipping(Technique):
    """Clamp weights to [−limit, limit] after each optimizer step.

    Acts in ``on_train_batch_end``, the first hook after the step, unless gradients are being accumulated.

    Args:
        limit: largest absolute value, positive.
        of: name of the module whose parameters are clipped: ``"critic"``; by default the whole model.

    Raises:
        ValueError: ``limit`` is not positive; in ``fit``: the model has no such module, or none of its parameters is
            trainable.

    Example:
        >>> clipping = WeightClipping(0.01, of="critic")

    Source:
        See :func:`~lightning_fasttrain.optim.clip_weights_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    effect: ClassVar[str] = "weights stay within a limit"
    when: ClassVar[str] = "you train critics of Wasserstein GANs; otherwise prefer weight decay"
    in_a_loop: ClassVar[str] = "optim.clip_weights_(parameters, limit)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "DeepSpeed keeps the weights that it updates separate from those of the model"
        return (Conflict(DeepSpeedStrategy, why, "Use FSDP2 or DDP"),)

    def __init__(self, limit: PositiveFloat, of: str = "") -> None:
        self.limit, self.of = limit, of
        self._parameters: list[Tensor] = []

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        return self._parameters.clear  # releases the model after the run

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called when the model is complete."""
        self._parameters = list(find_module(pl_module, self.of, "of").parameters())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: called after the optimizer step."""
        if not accumulation_continues(trainer):
            clip_weights_(self._parameters, self.limit)


@check_arguments
def allow_fused_clipping_(precision: Precision) -> Undo | None:
    """Let ``precision`` clip gradients of optimizers made with ``fused=True``, where no loss scaler is in use.

    ``MixedPrecision`` refuses because a fused optimizer unscales gradients inside its step, so clipping before it would
    see scaled gradients. That holds for float16 alone: bfloat16 uses no scaler, so gradients are not scaled.

    Args:
        precision: a trainer's ``precision_plugin``; only ``bf16-mixed`` is changed.

    Returns:
        A function that undoes it; None if there was nothing to change.

    Example:
        >>> from lightning.pytorch.plugins.precision import MixedPrecision
        >>> undo = allow_fused_clipping_(MixedPrecision("bf16-mixed", "cpu"))

    Source:
        Lightning issue 21435.
    """
    if not isinstance(precision, MixedPrecision) or precision.scaler is not None:
        return None

    def clip_gradients(*args: Any, **kwargs: Any) -> None:
        # The method of the base class clips without this check.
        Precision.clip_gradients(precision, *args, **kwargs)

    return patch(precision, "clip_gradients", clip_gradients)


class FusedClipping(Technique):
    """Make ``gradient_clip_val`` work with ``AdamW(fused=True)`` under ``precision="bf16-mixed"``.

    Acts on this trainer's precision plugin, for the duration of the run. Fabric and bare loops do not need it, since
    their clipping does not refuse.

    Example:
        >>> clipping = FusedClipping()

    Source:
        See :func:`~lightning_fasttrain.optim.allow_fused_clipping_`.
    """

    effect: ClassVar[str] = "gradient clipping with a fused optimizer in bf16"
    when: ClassVar[str] = "you clip in mixed precision with a fused optimizer, which Lightning refuses"
    in_a_loop: ClassVar[str] = "nothing: fabric.clip_gradients and torch.nn.utils.clip_grad_norm_ work as they are"
    predicted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.precision not in (None, "bf16-mixed"):
            return f"Lightning refuses fused clipping only in bf16-mixed; the precision is {facts.precision}"
        return "the Trainer does not clip gradients" if facts.clips == "no" else None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        undo = allow_fused_clipping_(trainer.precision_plugin)
        if undo is None:
            note_once(f"FusedClipping: precision {trainer.precision} needs no change, or does not allow it (float16)")
        return undo
