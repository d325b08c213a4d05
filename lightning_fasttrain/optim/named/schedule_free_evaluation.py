"""A run with a schedule-free optimizer is evaluated at the average of its weights, and trained where it steps."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fasttrain._messages import explain


class ScheduleFreeEvaluation(L.Callback):
    """Call a schedule-free optimizer's ``eval()`` before each validation and at the end, and its ``train()`` otherwise.

    Such an optimizer takes gradients at one point and averages others, which is what it has learnt; without this a run
    validates, and ends, at the point of the gradients. In a Fabric or bare loop call the two methods yourself.

    There and back the weights are the same but for rounding. Checkpoints that are written while a run trains hold the
    point of the gradients, so that it goes on bit for bit; for the average load model and optimizer, and call its
    ``eval()``. A checkpoint that is saved after the fit holds the average, and goes on from it.

    Raises:
        ValueError: in ``fit``: none of the optimizers is schedule-free.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(callbacks=[ScheduleFreeEvaluation()])  # beside ft.NamedOptimizer("schedule-free")

    Source:
        Defazio et al. 2024, "The Road Less Scheduled", https://arxiv.org/abs/2405.15682, and their package.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: a checkpoint is read, whichever of the two points it holds."""
        if not _find_averaging(trainer):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            why = "its weights are no average of others"
            way_out = "Use ft.build_optimizer(model, 'schedule-free'), or leave the callback out"
            raise ValueError(explain(f"{type(self).__name__} with {kinds}", why, way_out))
        _to_gradients(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: within a fit; alone, a validation has no optimizer."""
        _to_average(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: before ModelCheckpoint's, which comes last."""
        if trainer.state.fn == TrainerFn.FITTING:
            _to_gradients(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: what the user has in hands after the fit."""
        _to_average(trainer)


def _find_averaging(trainer: L.Trainer) -> list[Any]:
    # By its method: the package that brings the class is optional.
    return [optimizer for optimizer in trainer.optimizers if callable(getattr(optimizer, "eval", None))]


def _to_average(trainer: L.Trainer) -> None:
    for optimizer in _find_averaging(trainer):
        optimizer.eval()


def _to_gradients(trainer: L.Trainer) -> None:
    for optimizer in _find_averaging(trainer):
        optimizer.train()
