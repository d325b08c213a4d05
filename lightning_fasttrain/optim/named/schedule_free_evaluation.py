"""A run with a schedule-free optimizer is evaluated at the average of its weights, and trained where it steps."""

from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_fasttrain.core.messages import explain


class ScheduleFreeEvaluation(L.Callback):
    """Call a schedule-free optimizer's ``eval()`` before each validation and at the end, and its ``train()`` otherwise.

    Such an optimizer takes gradients at one point and averages others, which is what it has learnt; without this a run
    validates, and ends, at the point of the gradients. In a Fabric or bare loop call the two methods yourself.

    The optimizer computes its way there and back, which rounds, on each processor in its own way. A validation within
    a fit leaves the weights bit for bit as they were: they are kept aside meanwhile, which takes their size once more.
    Checkpoints that are written while a run trains hold the point of the gradients, so that it goes on bit for bit; for
    the average load model and optimizer, and call its ``eval()``. A checkpoint that is saved after the fit holds the
    average, and goes on from it.

    Raises:
        ValueError: in ``fit``: none of the optimizers is schedule-free.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(callbacks=[ScheduleFreeEvaluation()])  # beside ft.NamedOptimizer("schedule-free")

    Source:
        Defazio et al. 2024, "The Road Less Scheduled", https://arxiv.org/abs/2405.15682, and their package.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

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
        weights = [_Kept.of(p) for optimizer in _find_averaging(trainer) for p in _parameters_of(optimizer)]
        _to_average(trainer)
        # Those that have moved: a checkpoint that was saved after a fit holds the average already.
        self._kept = [kept._replace(version=kept.weight._version) for kept in weights if kept.is_overwritten]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: before ModelCheckpoint's, which comes last."""
        # Whoever has written into a weight meanwhile meant it; the optimizer's own way back is right for such a one.
        untouched = [kept for kept in self._kept if not kept.is_overwritten]
        self._kept = []
        if trainer.state.fn == TrainerFn.FITTING:
            _to_gradients(trainer)
            for kept in untouched:
                kept.put_back()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: what the user has in hands after the fit."""
        _to_average(trainer)


class _Kept(NamedTuple):
    """A weight, its numbers, and the version at which both were as the callback left them."""

    weight: Tensor
    numbers: Tensor
    version: int

    @classmethod
    def of(cls, weight: Tensor) -> "_Kept":
        return cls(weight, weight.detach().clone(), weight._version)

    @property
    def is_overwritten(self) -> bool:
        return self.weight._version != self.version

    @torch.no_grad()
    def put_back(self) -> None:
        self.weight.copy_(self.numbers)


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _find_averaging(trainer: L.Trainer) -> list[Any]:
    # By its method: the package that brings the class is optional.
    return [optimizer for optimizer in trainer.optimizers if callable(getattr(optimizer, "eval", None))]


def _to_average(trainer: L.Trainer) -> None:
    for optimizer in _find_averaging(trainer):
        optimizer.eval()


def _to_gradients(trainer: L.Trainer) -> None:
    for optimizer in _find_averaging(trainer):
        optimizer.train()
