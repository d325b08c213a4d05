"""Evaluate a run with a schedule-free optimizer at the average of its weights, and train it at the current ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.host.lightning import configured_optimizers
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.parameters import names_of_parameters, parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


class ScheduleFreeEvaluation(L.Callback):
    """Call a schedule-free optimizer's ``eval()`` before each validation and at the end, and its ``train()`` otherwise.

    Such an optimizer computes gradients at one point and averages others, and the average is the trained model; without
    this a run validates, and ends, at the point of the gradients. In a Fabric or bare loop call the two methods
    yourself.

    The optimizer computes one point from the other, with rounding that depends on the device. A validation, and a save,
    within a fit leave the weights unchanged bit for bit: they are copied meanwhile, which takes their size once more.
    Checkpoints hold the average as the model's weights, which ``load_from_checkpoint``, ``trainer.validate``, ``test``
    and ``predict`` evaluate, and the point of the gradients beside it, so that a run resumes bit for bit. Where a
    strategy shards the parameters they hold the point of the gradients alone: load model and optimizer, and call its
    ``eval()``.

    Statistics of BatchNorm are those of the training, at the other point. The method's authors recompute them: run some
    batches in training mode, without steps, between ``eval()`` and the evaluation.

    Raises:
        ValueError: in ``fit``: none of the optimizers is schedule-free.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(callbacks=[ScheduleFreeEvaluation()])  # beside ft.optim.NamedOptimizer("schedule-free")

    Source:
        Defazio et al. 2024, "The Road Less Scheduled", https://arxiv.org/abs/2405.15682, and their package.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._resumed: dict[str, Tensor] = {}
        self._loaded: list[dict[str, Any]] = []  # the optimizers' states in the checkpoint of an evaluation
        self._undo: Undo | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: whoever saves, and whenever, saves the average; an evaluation alone loads it."""
        self._loaded, self._resumed = [], {}
        if trainer.state.fn == TrainerFn.FITTING:
            save = trainer.save_checkpoint

            def save_checkpoint(*args: Any, **kwargs: Any) -> None:
                with self._at_average(trainer, pl_module):
                    save(*args, **kwargs)

            self._undo = patch(trainer, "save_checkpoint", save_checkpoint)
            return
        load = pl_module.on_load_checkpoint

        # It hands its checkpoint to the module, and to no callback.
        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            load(checkpoint)
            self._loaded = checkpoint.get("optimizer_states", [])

        self._undo = patch(pl_module, "on_load_checkpoint", on_load_checkpoint)

    @contextmanager
    def _at_average(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[None]:
        groups = [group for optimizer in _find_averaging(trainer) for group in optimizer.param_groups]
        # In a validation, and after the fit, the weights are the average already.
        if is_sharded(pl_module) or not any(group.get("train_mode") for group in groups):
            yield
            return
        self._to_average(trainer)
        try:
            yield
        finally:
            self._to_gradients(trainer)

    def _to_average(self, trainer: L.Trainer) -> None:
        weights = [_Kept.of(p) for optimizer in _find_averaging(trainer) for p in parameters_of(optimizer)]
        _to_average(trainer)
        # Those that were switched: a checkpoint that was saved after a fit already holds the average.
        self._kept = [kept._replace(version=kept.weight._version) for kept in weights if kept.is_overwritten]

    def _to_gradients(self, trainer: L.Trainer) -> None:
        # If a weight was written meanwhile, the change is kept: the optimizer's own conversion is right for it.
        untouched = [kept for kept in self._kept if not kept.is_overwritten]
        self._kept = []
        _to_gradients(trainer)
        for kept in untouched:
            kept.restore()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: the weights of the model are the average."""
        names = names_of_parameters(pl_module)
        if self._kept and not is_sharded(pl_module):
            checkpoint[_KEY] = {names[kept.weight]: kept.numbers for kept in self._kept if kept.weight in names}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: the weights are loaded, and the optimizers do not exist yet."""
        self._resumed = checkpoint.get(_KEY, {})

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: the end of a run."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: the end of a run that failed, after which Lightning calls no ``teardown``."""
        self.teardown(trainer, pl_module, "")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called after a checkpoint is loaded, whichever of the two points it holds."""
        if not _find_averaging(trainer):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            why = "its weights are not an average of others"
            way_out = "Use ft.build_optimizer(model, 'schedule-free'), or remove the callback"
            raise ValueError(explain(f"{type(self).__name__} with {kinds}", why, way_out))
        _to_gradients(trainer)
        resumed, self._resumed = self._resumed, {}
        parameters = {name: p for p, name in names_of_parameters(pl_module).items()}
        with torch.no_grad():
            for name, numbers in resumed.items():
                parameters[name].copy_(numbers)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called before the first batch, within a fit or in an evaluation alone."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in pl_module.modules()):
            note_once(_OF_BATCH_NORM)
        if trainer.state.fn != TrainerFn.FITTING:
            self._average_loaded(pl_module)
            return
        self._to_average(trainer)

    def _average_loaded(self, pl_module: L.LightningModule) -> None:
        """Compute the average from a checkpoint's weights, with the states of the optimizers that wrote it."""
        states, self._loaded = self._loaded, []
        if not states:
            return
        for optimizer, state in zip(configured_optimizers(pl_module)[0], states, strict=True):
            if _averages(optimizer):
                optimizer.load_state_dict(state)
                optimizer.eval()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: called before ModelCheckpoint's, which comes last."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._to_gradients(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: leave the average in the model after the fit."""
        _to_average(trainer)


_OF_BATCH_NORM = (
    "ScheduleFreeEvaluation: BatchNorm's statistics are those at the point of the gradients, not of the average; the "
    "method's authors run some batches in training mode before an evaluation to recompute them"
)


_KEY = "ScheduleFreeEvaluation"


class _Kept(NamedTuple):
    """A weight, its values, and its version when the callback last set both."""

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
    def restore(self) -> None:
        self.weight.copy_(self.numbers)


def _find_averaging(trainer: L.Trainer) -> list[Any]:
    # Detected by its method, since the package that provides the class is optional.
    return list(filter(_averages, trainer.optimizers))


def _averages(optimizer: object) -> TypeGuard[Any]:
    return callable(getattr(optimizer, "eval", None))


def _to_average(trainer: L.Trainer) -> None:
    for optimizer in _find_averaging(trainer):
        optimizer.eval()


def _to_gradients(trainer: L.Trainer) -> None:
    for optimizer in _find_averaging(trainer):
        optimizer.train()
