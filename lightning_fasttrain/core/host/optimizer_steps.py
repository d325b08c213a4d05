"""Tell whether optimizers took a step; read the gradients that DeepSpeed's hold, and skip one of their steps."""

from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.host.lightning import FabricOptimizer, plain_optimizer
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import gradients_of
from lightning_fasttrain.core.modules.wrapped_forward import patched


def unwrap_optimizer(optimizer: object) -> Any:
    """Return the optimizer inside of Lightning's or Fabric's wrapper: one of torch, or DeepSpeed's own.

    Raises:
        TypeError: not an optimizer.
    """
    if isinstance(optimizer, FabricOptimizer | LightningOptimizer):
        optimizer = optimizer.optimizer
    return optimizer if is_deepspeed(optimizer) else plain_optimizer(optimizer)


def is_deepspeed(optimizer: object) -> bool:
    """Whether an optimizer is one of DeepSpeed's around that of the user."""
    return type(optimizer).__module__.startswith("deepspeed.runtime")


class TakenSteps:
    """Tells whether the optimizers of a run have taken a step, which a guard or a loss scaler may have skipped.

    Under manual optimization that is when the user's code has called ``step``.

    Args:
        trainer: at the start of its training, when the optimizers exist.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._optimizers = list(map(unwrap_optimizer, trainer.optimizers))
        self._taken = 0
        self._handles: list[Any] = []
        for optimizer in self._optimizers:
            if isinstance(optimizer, Optimizer):
                self._handles.append(optimizer.register_step_post_hook(self._note))
        # DeepSpeed's have no hooks; others that step by themselves, in the backward, call none.
        self._counts_all = not self._handles or len(self._handles) < len(self._optimizers)
        self._seen = trainer.global_step

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        self._taken += not was_skipped_on_device(optimizer)

    def has_new(self) -> bool:
        """Return whether a step was taken since the last call."""
        before, self._seen = self._seen, self._trainer.global_step
        if self._counts_all:
            skipped = any(getattr(optimizer, "overflow", False) for optimizer in self._optimizers)
            return self._seen != before and not skipped
        taken, self._taken = self._taken, 0
        return taken > 0

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def skip_on_device(optimizer: Optimizer, flag: Tensor) -> None:
    """Have a fused optimizer of torch skip its coming steps where a flag on its device is 1.

    Whoever sets it reports a skipped step as an error, so :func:`was_skipped_on_device` need not wait for the flag.
    """
    vars(optimizer).update(found_inf=flag, reports_skipped=True)


def stop_skipping(optimizer: Optimizer) -> None:
    """Undo :func:`skip_on_device`."""
    if vars(optimizer).pop("reports_skipped", False):
        del vars(optimizer)["found_inf"]


def was_skipped_on_device(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has skipped the step that ends now, in a hook after it.

    A loss scaler or a guard tells such an optimizer by ``found_inf``, a tensor on its device, which is waited for.
    Other optimizers are not called for a step that is skipped, and have no such attribute.
    """
    if getattr(optimizer, "reports_skipped", False):
        return False
    overflow = getattr(optimizer, "found_inf", None)
    return isinstance(overflow, Tensor) and bool(overflow)


def refuse_unguardable(optimizer: Any) -> None:
    """Refuse those of DeepSpeed's optimizers whose steps cannot be skipped from outside.

    Raises:
        TypeError: the optimizer has a loss scaler, or holds its gradients where they cannot be read.
    """
    what = f"guarding the steps of {type(optimizer).__name__}"
    if not _is_sharded(optimizer) and not hasattr(optimizer, "fp16_groups"):
        why = "DeepSpeed's engine holds the gradients and steps by itself"
        raise TypeError(explain(what, why, "Leave data_types.grad_accum_dtype out of the config, or use FSDP2 or DDP"))
    if _compute_parameters(optimizer)[0].dtype == torch.float16:
        why = "in float16 DeepSpeed's loss scaler skips steps that are not finite by itself"
        raise TypeError(explain(what, why, "Use precision='bf16-mixed', or rely on DeepSpeed's check"))


def gradient_device(optimizer: Any) -> torch.device:
    """Return the device that computes the gradients, even if they are offloaded."""
    return _compute_parameters(optimizer)[0].device


def has_unfinite_gradient(optimizer: Any) -> bool:
    """Return whether the reduced gradient contains NaN or infinity; the same on all ranks, which all take part."""
    if not _is_sharded(optimizer):
        gradients = gradients_of(_compute_parameters(optimizer))
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)
    # Before the first reduction of a window, stages 1 and 2 hold no gradient.
    if any(held is None for held in optimizer.averaged_gradients.values()):
        return False
    return bool(optimizer.has_overflow())


def gradient_norm(optimizer: Any) -> Tensor:
    """Return the 2-norm of the coming step's gradient over all ranks, without the loss scale."""
    if not _is_sharded(optimizer):
        return torch.nn.utils.get_total_norm(gradients_of(_compute_parameters(optimizer)))
    if hasattr(optimizer, "scaled_global_norm"):
        norm = optimizer.scaled_global_norm()
    else:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norm = combine_grad_norm_groups(optimizer._get_norm_groups())
    return torch.as_tensor(norm) / optimizer.loss_scale


def skip_step(optimizer: Any) -> None:
    """Discard the gradients of the coming step as if they had overflowed: DeepSpeed's engine counts it as skipped."""
    optimizer.overflow = True
    if not _is_sharded(optimizer):
        return  # The engine sets the gradients of the parameters to None.

    def overflow(*args: object, **kwargs: object) -> bool:
        optimizer.overflow = True
        if clean_up is not None:
            clean_up(optimizer.loss_scale)
        return True

    clean_up = getattr(optimizer, "_overflow_clean_up", None)
    checks: dict[str, object] = {"check_overflow": overflow, "check_grad_overflow": True}
    if clean_up is not None:  # Stage 3.
        checks = {"_overflow_check_and_loss_scale_update": overflow}
        # Otherwise a parameter without a gradient in the next step would keep its NaN.
        optimizer.grad_partitions_flat_buffer.zero_()
    with ExitStack() as undo:
        for name, value in checks.items():
            undo.enter_context(patched(optimizer, name, value))
        type(optimizer).step(optimizer)


def whole_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient of a parameter; if DeepSpeed holds it, gathered from all ranks, which all take part."""
    if parameter.grad is not None or not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def own_shard(parameter: Any) -> Tensor:
    """Return this rank's values of a parameter of stage 3, without the uninitialized padding behind them."""
    shard = parameter.ds_tensor
    start = dist.get_rank(parameter.ds_process_group) * shard.ds_numel
    values = min(max(parameter.ds_numel - start, 0), shard.numel())
    return shard.detach().narrow(0, 0, values)


def _is_sharded(optimizer: Any) -> bool:
    """Whether it is of stage 1 to 3; stage 0 in 16 bits has an optimizer of another kind."""
    return hasattr(optimizer, "has_overflow") and hasattr(optimizer, "averaged_gradients")


def _compute_parameters(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters that the forward uses, of which the optimizer steps copies in float32."""
    groups = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.fp16_groups
    return [parameter for group in groups for parameter in group]
