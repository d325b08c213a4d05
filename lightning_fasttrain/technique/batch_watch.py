"""What only the batches of a run show: techniques that did nothing, and batches without a loss."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L

from lightning_fasttrain.core.messages import explain, warn


class BatchWatch:
    """Replaces a callback's ``on_train_batch_end`` until it has said, once each, what there is to say.

    Args:
        holder: the callback.
        own: what stood there before; None if that was nothing.
        idle: asked after the first batch that had a loss: model → names of techniques that did nothing in it, with why
            and what to do.
        divides: whether Lightning divides the losses of an accumulation window.
    """

    def __init__(
        self,
        holder: L.Callback,
        own: Callable[..., Any] | None,
        idle: Callable[[L.LightningModule], Iterable[tuple[str, str, str]]],
        divides: bool,
    ) -> None:
        self.holder, self.own, self.idle = holder, own, idle
        self.to_ask, self.to_tell = True, divides

    def __call__(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.own is not None:
            self.own(trainer, pl_module, outputs, batch, batch_idx)
        # With manual optimisation a step may return nothing and train all the same.
        if self.to_ask and (outputs or not pl_module.automatic_optimization):
            self.to_ask = False
            for name, why, way_out in self.idle(pl_module):
                warn(explain(f"{name} did nothing in the first batch", why, way_out))
        if self.to_tell and not outputs:
            self.to_tell = False
            _tell_of_missing_loss(batch_idx, trainer.accumulate_grad_batches)
        if not self.to_ask and not self.to_tell:
            self.holder.on_train_batch_end = self.own  # type: ignore[method-assign]  # None is never called


def _tell_of_missing_loss(batch_idx: int, factor: int) -> None:
    what = f"training_step returned None for batch {batch_idx}, with accumulate_grad_batches={factor}"
    why = f"Lightning divides by {factor} all the same, so this step's gradient is too small"
    warn(explain(what, why, f"Use TokenWeightedAccumulation({factor}) instead of accumulate_grad_batches"))
