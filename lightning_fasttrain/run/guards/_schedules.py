"""Keep learning-rate schedules at their position in a step that was skipped."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion

from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


def hold_schedules_(trainer: L.Trainer, module: L.LightningModule, was_skipped: Callable[[], bool]) -> Undo:
    """Skip per-step schedules where ``was_skipped``; per-epoch schedules are not affected. Return how to undo it."""
    own = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: LRSchedulerTypeUnion, metric: Any) -> None:
        by_step = any(one.scheduler is scheduler and one.interval == "step" for one in trainer.lr_scheduler_configs)
        if not (by_step and was_skipped()):
            own(scheduler, metric)

    return patch(module, "lr_scheduler_step", lr_scheduler_step)
