"""Collect the subject of a question about techniques: a model, a Trainer if there is one, and the techniques in use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.host.lightning import list_callbacks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.predict.fake_model import Factory
from lightning_fasttrain.predict.memory_report import MemoryReport
from lightning_fasttrain.predict.predict_memory import PRECISIONS, Loss, predict_memory
from lightning_fasttrain.technique import Technique, check_together
from lightning_fasttrain.technique.technique import techniques_of


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its Trainer, and its techniques.

    Args:
        module: the model, or a function that builds it.
        trainer: the Trainer; None if there is none.
        techniques: the techniques in use, or to be used.
        precision: Lightning's name of the precision.
        device: the device of the training.
    """

    module: nn.Module | Factory
    trainer: L.Trainer | None
    techniques: list[Technique]
    precision: str
    device: torch.device

    @property
    def is_fitting(self) -> bool:
        """Whether the techniques act on the model right now."""
        if self.trainer is None:
            return False
        state = self.trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    @property
    def predicted_device(self) -> str:
        """The type of the device for which memory is predicted."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def as_trained(self) -> tuple[str, int, int]:
        """The name of the strategy, the number of ranks, and the batches per step, as set in the Trainer."""
        trainer = self.trainer
        if trainer is None:
            return "no Trainer", 1, 1
        return type(trainer.strategy).__name__, trainer.world_size, trainer.accumulate_grad_batches

    def predict(
        self,
        batch: object,
        loss: Loss | None,
        optimizer: Callable[[Any], Optimizer] | None,
        techniques: Sequence[Technique] | None = None,
    ) -> MemoryReport:
        """Predict the memory of a step on this device, with its own techniques by default."""
        return predict_memory(
            self.module,
            batch,
            loss=loss,
            optimizer=optimizer,
            techniques=self.techniques if techniques is None else techniques,
            precision=self.precision,
            device=self.predicted_device,
        )


def find_setup(
    module: nn.Module | Factory | L.Trainer,
    techniques: Sequence[Technique] | None,
    trainer: L.Trainer | None,
    precision: str,
) -> TrainingSetup:
    """Complete the user's arguments with those that follow from them.

    Raises:
        TypeError, ValueError: invalid or conflicting techniques, or a Trainer without a model.
    """
    if isinstance(module, L.Trainer):
        trainer, held = module, module.lightning_module
        if held is None:
            why = "it gets its model when it begins to fit"
            raise ValueError(explain("a Trainer without a model", why, "Give both: explain(model, trainer=trainer)"))
        module = held
    if techniques is None:
        techniques = _list_techniques(module, trainer)
    if trainer is None:
        one_of("precision", precision, tuple(PRECISIONS))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return TrainingSetup(module, None, check_together(techniques), precision, device)
    # The strategy too may conflict with techniques.
    checked = check_together(techniques, trainer.strategy)
    return TrainingSetup(module, trainer, checked, str(trainer.precision), trainer.strategy.root_device)


def _list_techniques(module: nn.Module | Factory, trainer: L.Trainer | None) -> list[Technique]:
    """Return the techniques of the Trainer, and those that the module would bring to it."""
    listed = [] if trainer is None else techniques_of(trainer)
    brought = list_callbacks(module.configure_callbacks) if isinstance(module, L.LightningModule) else []
    # A Trainer that has met the module has them already.
    kinds = {type(technique) for technique in listed}
    for callback in brought:
        if isinstance(callback, Technique) and type(callback) not in kinds:
            listed.append(callback)
    return listed
