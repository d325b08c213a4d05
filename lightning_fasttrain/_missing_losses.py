"""Floor: a batch without a loss inside one of Lightning's accumulation windows."""

from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_fasttrain._messages import explain, warn


def tell_of_missing_losses(own: Callable[..., Any] | None) -> Callable[..., None]:
    """An ``on_train_batch_end`` that also warns, once, of a batch whose ``training_step`` returned None.

    Args:
        own: what stood there before; None if that was nothing.
    """
    told = False

    def on_train_batch_end(
        trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        nonlocal told
        if own is not None:
            own(trainer, pl_module, outputs, batch, batch_idx)
        if outputs or told:
            return
        told = True
        factor = trainer.accumulate_grad_batches
        warn(
            explain(
                f"training_step returned None for batch {batch_idx}, with accumulate_grad_batches={factor}",
                f"Lightning divides by {factor} all the same, so this step's gradient is too small",
                f"Use TokenWeightedAccumulation({factor}) instead of accumulate_grad_batches",
            )
        )

    return on_train_batch_end
