"""Release gradients as soon as they have been used."""

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import ClassVar

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.host.optimizer_steps import unwrap_optimizer
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Conflict, Setting, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep


@check_arguments
def release_gradients_(parameters: Iterable[nn.Parameter]) -> int:
    """Set every gradient to None, so that its memory is free during the next forward.

    Call it right after ``optimizer.step()``.

    Args:
        parameters: parameters of the model; those without a gradient are skipped.

    Returns:
        The number of bytes released.

    Raises:
        TypeError: a module was passed instead of its parameters.

    Example:
        >>> import torch
        >>> net = nn.Linear(4, 2)
        >>> net(torch.ones(1, 4)).sum().backward()
        >>> release_gradients_(net.parameters()), net.weight.grad
        (40, None)
    """
    released = 0
    for parameter in parameters:
        if parameter.grad is not None:
            released += _bytes_of(parameter.grad)
            parameter.grad = None  # not zeros, which would keep the memory
    return released


def _bytes_of(gradient: Tensor) -> int:
    if gradient.is_sparse:  # such as an embedding's
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.nbytes


class EagerGradientRelease(Technique):
    """Free the gradients right after the optimizer step instead of during the next one.

    Lightning zeroes gradients between the next forward and backward, so one full set of them stays in memory while the
    activations grow. Acts in ``on_train_batch_end``, after the step and unless gradients are being accumulated; under
    manual optimization on those that a step has used, and to which no backward has added since. Callbacks that read
    gradients do so in ``on_before_optimizer_step``. Under DDP with ``gradient_as_bucket_view`` the buckets stay;
    strategies that own their gradients (DeepSpeed) are skipped.

    Example:
        >>> release = EagerGradientRelease()

    Source:
        ``zero_grad`` before the forward is the order of PyTorch's own training recipes.
    """

    effect: ClassVar[str] = "no gradients in memory during the forward"
    when: ClassVar[str] = "gradients are a large share of the peak; no effect where they are accumulated over batches"
    in_a_loop: ClassVar[str] = "optim.release_gradients_(model.parameters())"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("gradients", "released"),)
    predicted: ClassVar[bool] = True

    def __init__(self) -> None:
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        self._hooks = ExitStack()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_used": {}, "_hooks": ExitStack()}

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "DeepSpeed keeps buffers for the gradients in host memory, and needs them in the next step"
        way_out = "Remove it, since the device then holds no gradients"
        return (Conflict(DeepSpeedStrategy, why, way_out, _would_take_from_the_host),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.accumulates is not None and facts.accumulates > 1:
            return f"gradients are accumulated over {facts.accumulates} batches, so they exist during most forwards"
        return None

    def predict(self, step: PredictedStep) -> None:
        step.releases = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called when the strategy is known; log if there is nothing to do."""
        if trainer.strategy.handles_gradient_accumulation:
            note_once(f"EagerGradientRelease: {type(trainer.strategy).__name__} frees its gradients itself")

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        self._used.clear()
        return self._hooks.close

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the optimizers exist."""
        if pl_module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
            return
        for optimizer in map(unwrap_optimizer, trainer.optimizers):
            self._hooks.callback(optimizer.register_step_post_hook(self._note_used).remove)

    def _note_used(self, optimizer: Optimizer, *_: object) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._used[parameter] = weakref.ref(parameter.grad), parameter.grad._version

    def _release_used(self) -> None:
        """Release the gradients that a step has used, unless a backward has added to them since."""
        for parameter, (reference, version) in self._used.items():
            gradient = parameter.grad
            if gradient is not None and reference() is gradient and gradient._version == version:
                parameter.grad = None
        self._used.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the first one after the optimizer step."""
        if not pl_module.automatic_optimization:
            self._release_used()
            return
        if not (trainer.strategy.handles_gradient_accumulation or accumulation_continues(trainer)):
            for optimizer in trainer.optimizers:
                release_gradients_(parameters_of(optimizer))


def _would_take_from_the_host(release: EagerGradientRelease, zero: DeepSpeedStrategy) -> bool:
    if zero.handles_gradient_accumulation:  # nothing is released in this case
        return False
    assert isinstance(zero.config, dict)  # Lightning has already read a config file
    return "offload_optimizer" in zero.config.get("zero_optimization", {})
