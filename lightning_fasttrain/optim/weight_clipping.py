"""Clip weights to a limit after each step."""

from collections.abc import Iterable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from lightning_fasttrain.core.host.lightning import accumulation_continues
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.named_module import module_named
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Conflict, Exactness, Technique


@torch.no_grad()
def clip_weights_(parameters: Iterable[Tensor], limit: float) -> int:
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
    _refuse_limit(limit)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(explain("clip_weights_", "none of the parameters is trainable", "Pass trainable parameters"))
    # For all at once: a kernel for each small parameter would take longer to launch than to run.
    torch._foreach_clamp_min_(trained, -limit)
    torch._foreach_clamp_max_(trained, limit)
    return len(trained)


def _refuse_limit(limit: float) -> None:
    if not limit > 0:
        raise ValueError(explain(f"limit={limit}", "all weights would become zero", "Use limit=0.01 or more"))


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
    when: ClassVar[str] = "critics of Wasserstein GANs; otherwise prefer weight decay"
    in_a_loop: ClassVar[str] = "optim.clip_weights_(parameters, limit)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "DeepSpeed keeps the weights that it updates separate from those of the model"
        return (Conflict(DeepSpeedStrategy, why, "Use FSDP2 or DDP"),)

    def __init__(self, limit: float, of: str = "") -> None:
        _refuse_limit(limit)
        self.limit, self.of = limit, of
        self._parameters: list[Tensor] = []

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        return self._parameters.clear  # releases the model after the run

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called when the model is complete."""
        self._parameters = list(module_named(pl_module, self.of, "of").parameters())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hook: called after the optimizer step."""
        if not accumulation_continues(trainer):
            clip_weights_(self._parameters, self.limit)
