"""Release gradients as soon as they have been used."""

from collections.abc import Iterable
from typing import ClassVar

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.parameters import parameters_of
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
    activations grow. Acts in ``on_train_batch_end``, after the step and unless gradients are being accumulated;
    callbacks that read gradients do so in ``on_before_optimizer_step``. Under DDP with ``gradient_as_bucket_view`` the
    buckets stay; strategies that own their gradients (DeepSpeed) are skipped.

    Example:
        >>> release = EagerGradientRelease()

    Source:
        ``zero_grad`` before the forward is the order of PyTorch's own training recipes.
    """

    effect: ClassVar[str] = "no gradients in memory during the forward"
    when: ClassVar[str] = "gradients are a large share of the peak; no effect where they are accumulated over batches"
    in_a_loop: ClassVar[str] = "release_gradients_(model.parameters())"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("gradients", "released"),)
    predicted: ClassVar[bool] = True

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

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the first one after the optimizer step."""
        if not (trainer.strategy.handles_gradient_accumulation or accumulation_continues(trainer)):
            for optimizer in trainer.optimizers:
                release_gradients_(parameters_of(optimizer))


def _would_take_from_the_host(release: EagerGradientRelease, zero: DeepSpeedStrategy) -> bool:
    if zero.handles_gradient_accumulation:  # nothing is released in this case
        return False
    assert isinstance(zero.config, dict)  # Lightning has already read a config file
    return "offload_optimizer" in zero.config.get("zero_optimization", {})
