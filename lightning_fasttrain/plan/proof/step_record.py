"""Runs a few steps of a model's copy in a Trainer of their own, and keeps what came of them."""

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_fasttrain._host import without_trainer
from lightning_fasttrain._messages import FastTrainWarning, explain, list_some, log
from lightning_fasttrain._random_state import random_state
from lightning_fasttrain._surgery import patch
from lightning_fasttrain.data.normalizer.trial.restore_state import remember
from lightning_fasttrain.data.normalizer.trial.step_function import loss_of
from lightning_fasttrain.finetune.account_bytes import account_bytes
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters
from lightning_fasttrain.finetune.adapters.base_model import base_model
from lightning_fasttrain.finetune.quantized._quantized_layer import is_quantized
from lightning_fasttrain.plan.proof.without_dropout import without_dropout
from lightning_fasttrain.technique import Technique

_LARGE_SHARE = 0.05  # of a model's bytes
_SEED = 1_000_003  # of the first step; any number that nobody's own seed is likely to be


@dataclass
class StepRecord:
    """What a few steps gave. Tensors are copies on the CPU, by the names of parameters and buffers.

    Attributes:
        losses: of each batch; none where several batches make a step.
        gradients: of the first optimizer step, before clipping.
        reached: which entries of each weight ever had a gradient other than zero.
        before, after: the weights that train, at the start and at the end.
        buffers: at the end.
        evaluation: the first batch's loss in evaluation, at the start and at the end; None where it has none.
        training: its loss in training without dropout, at the end.
        base: its loss in evaluation with the adapters switched off, at the end; None if there are none.
        trains: names of the parameters that require a gradient.
        unheld: those of them that no optimizer has.
        quantized: whether the model has quantised layers.
        draws: whether the first step drew random numbers.
        idle: name of a technique that did nothing → why.
        warnings: what the suite warned about.
        left: sentences on large weights that are frozen as they were, beside others that techniques took hold of.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    reached: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluation: list[float | None] = field(default_factory=list)
    training: float | None = None
    base: float | None = None
    trains: list[str] = field(default_factory=list)
    unheld: list[str] = field(default_factory=list)
    quantized: bool = False
    draws: bool = False
    idle: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def updates(self) -> dict[str, Tensor]:
        """What the optimizer added to each weight, in float64."""
        return {name: self.after[name].double() - before.double() for name, before in self.before.items()}


@dataclass(frozen=True)
class Steps:
    """Which steps are run.

    Attributes:
        module: left as it is; copies are run.
        batches: one for each step.
        settings: of the Trainer.
        dropout: whether it stays on.
    """

    module: L.LightningModule
    batches: Sequence[Any]
    settings: dict[str, Any]
    dropout: bool = True


def record_steps(
    of: Steps,
    techniques: Sequence[Technique] = (),
    *,
    window: int = 1,
    change: Callable[[nn.Module], Any] | None = None,
) -> StepRecord:
    """Run a step for each of the batches, or for each ``window`` of them, on a copy, and keep what came of it.

    Args:
        of: what is run. Random states are put back; each step begins with the same ones in every record.
        techniques: copies of them act.
        window: batches that make a step.
        change: done to the copy right before its first step.

    Raises:
        TypeError: the module cannot be copied.
        Exception: whatever the module, or a technique, raises.
    """
    recorder = _Recorder(len(of.batches), window, change)
    recorder.record.warnings = run_steps(of, techniques, recorder)
    return recorder.record


def run_steps(of: Steps, techniques: Sequence[Technique], watcher: L.Callback) -> list[str]:
    """Run the batches on a copy, with copies of ``techniques`` and with ``watcher``, which is called last.

    Returns:
        What the suite warned about.

    Raises:
        TypeError: the module cannot be copied.
        Exception: whatever the module, or a technique, raises.
    """
    module = copy_module(of.module)
    if not of.dropout:
        without_dropout(module)
    with isolate_rng(), quietly() as warned, _only_these_techniques(module):
        _seed(0)
        trainer = L.Trainer(
            **{
                "accelerator": "auto",
                "devices": 1,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
                "limit_val_batches": 0,
                "max_epochs": 1000,  # what Lightning takes where nothing is said, without its warning
                **of.settings,
            },
            # The one that ends the run is last, so that the watcher sees the end of the last batch.
            callbacks=[*copy.deepcopy(list(techniques)), watcher, _StopAfter(len(of.batches))],
        )
        loader = DataLoader(_Repeated(of.batches), batch_size=None, collate_fn=as_it_is)
        with suppress(EnoughError):
            trainer.fit(module, loader)
    return warned


def copy_module(module: L.LightningModule) -> L.LightningModule:
    """A copy without the Trainer that ``module`` may be attached to.

    Raises:
        TypeError: it cannot be copied.
    """
    try:
        with without_trainer(module):
            return copy.deepcopy(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        way_out = "Give a function that builds it: lambda: MyModule(...)"
        raise TypeError(explain(f"{type(module).__name__} cannot be copied", why, way_out)) from error


def _seed(number: int) -> None:
    """Seed what a step may draw from. Lightning's own function would leave environment variables behind."""
    random.seed(_SEED + number)
    np.random.seed(_SEED + number)
    torch.manual_seed(_SEED + number)


class EnoughError(Exception):
    """Ends a fit before anything that belongs to the end of an epoch."""


class _StopAfter(L.Callback):
    """Ends a fit after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.batches:
            raise EnoughError


class _Repeated(Dataset[Any]):
    """The batches and as many again, so that none of the steps is the last of an epoch; each time a new copy."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 2 * len(self.batches) + 1

    def __getitem__(self, index: int) -> Any:
        return copy_batch(self.batches[index % len(self.batches)])


def as_it_is(batch: Any) -> Any:
    return batch


def copy_batch(batch: Any) -> Any:
    return apply_to_collection(batch, Tensor, torch.clone)


class _Recorder(L.Callback):
    """Fills a record. It comes after the techniques, so that they have acted."""

    def __init__(self, batches: int, window: int, change: Callable[[nn.Module], Any] | None) -> None:
        self.record = StepRecord()
        self.batches, self.window, self.change = batches, window, change
        self.first: Any = None
        self.arrived: dict[str, Tensor] = {}
        self.stepped = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        record = self.record
        if self.change is not None:
            self.change(pl_module)
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                record.trains.append(name)
                record.before[name] = _keep(parameter)
                parameter.register_hook(self._arrive(name))  # called before the gradient is added to `grad`
        if not record.trains:
            why = "no parameter requires a gradient, so there is no training to compare"
            raise ValueError(explain(type(pl_module).__name__, why, "Thaw what is to train"))
        record.unheld = _find_unheld(trainer, pl_module)
        record.left = _left_in_floats(pl_module)
        record.quantized = any(is_quantized(each) for each in pl_module.modules())

    def _arrive(self, name: str) -> Callable[[Tensor], None]:
        """An optimizer may use a gradient up as it arrives, so what arrives is added up here."""

        def arrive(gradient: Tensor) -> None:
            reached = self.record.reached
            reached[name] = reached.get(name, torch.tensor(False)) | (_keep(gradient) != 0)
            if not self.stepped:
                so_far = self.arrived.get(name)
                self.arrived[name] = _keep(gradient) if so_far is None else so_far + _keep(gradient)

        return arrive

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.first = copy_batch(batch)
            self.record.evaluation.append(self._evaluate(trainer, pl_module))
        # After the evaluation, which may draw: the step has to begin with the same numbers in every record.
        if batch_idx % self.window == 0:
            _seed(batch_idx // self.window)
        if batch_idx == 0:
            self.drawn = _numbers(random_state())

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self.stepped:
            return
        self.stepped = True
        self.record.gradients = self.arrived
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                self.record.gradients[name] = _keep(parameter.grad)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = self.record
        if outputs and self.window == 1:
            record.losses.append(float(loss_of(outputs)))
        if batch_idx == 0:
            record.draws = _numbers(random_state()) != self.drawn
            record.gradients = record.gradients or self.arrived  # an optimizer that steps in the backward calls no hook
            for technique in trainer.callbacks:
                if isinstance(technique, Technique) and (idle := technique.why_idle(pl_module)):
                    record.idle[type(technique).__name__] = idle[0]
        if batch_idx + 1 < self.batches:
            return
        parameters = dict(pl_module.named_parameters())
        record.after = {name: _keep(parameters[name]) for name in record.before}
        record.buffers = {name: _keep(buffer) for name, buffer in pl_module.named_buffers()}
        record.evaluation.append(self._evaluate(trainer, pl_module))
        record.training = self._evaluate(trainer, pl_module, training=True)
        record.base = self._evaluate_base(trainer, pl_module)

    def _evaluate_base(self, trainer: L.Trainer, module: L.LightningModule) -> float | None:
        if not adapter_parameters(module) or any(is_quantized(each) for each in module.modules()):
            return None
        try:
            with base_model(module):
                return self._evaluate(trainer, module)
        except ValueError:  # these adapters change the weights below them, which it says by itself
            return None

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule, training: bool = False) -> float | None:
        """The first batch's loss in evaluation, or in training without dropout, leaving no trace; None if it fails."""
        if self.window > 1:  # this is a part of a batch, whose loss is another
            return None
        put_back = remember([module])
        modes = [(each, each.training) for each in module.modules()]  # one by one: frozen parts may stay in evaluation
        restore_log = patch(module, "log", _say_nothing)
        restore_dropout = without_dropout(module)
        module.train(training)
        arguments = [copy_batch(self.first), 0]
        if not is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            arguments.pop()
        try:
            with torch.no_grad():
                # The strategy's rather than the module's own: it casts as the precision says.
                return float(loss_of(trainer.strategy.training_step(*arguments)))
        except (RuntimeError, TypeError, ValueError, AttributeError):  # many modules have nothing to do in evaluation
            return None
        finally:
            for each, mode in modes:
                each.training = mode
            restore_dropout()
            restore_log()
            put_back()


def _find_unheld(trainer: L.Trainer, module: L.LightningModule) -> list[str]:
    """Names of the parameters that train, and that no optimizer has."""
    held = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def _left_in_floats(module: L.LightningModule) -> list[str]:
    """Of a quantised model, which large weights are not: a sentence for each reason."""
    account = account_bytes(module)
    reasons: dict[str, list[str]] = {}
    for name, reason in account.left.items():
        if account.nbytes.get(name, 0) > _LARGE_SHARE * account.total:
            reasons.setdefault(reason, []).append(name)
    return [f"Not quantised: {list_some(names)}: {reason}." for reason, names in reasons.items()]


def _numbers(state: Any) -> str:
    return repr(apply_to_collection(state, Tensor, Tensor.tolist))


def _keep(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).cpu().clone()


def _say_nothing(*_: object, **__: object) -> None:
    pass


@contextmanager
def _only_these_techniques(module: L.LightningModule) -> Iterator[None]:
    """A module that brings techniques along must not add them to a plain run."""
    own = module.configure_callbacks

    def configure_callbacks() -> list[L.Callback]:
        brought: Any = own() or []
        listed = [brought] if isinstance(brought, L.Callback) else brought
        return [callback for callback in listed if not isinstance(callback, Technique)]

    restore = patch(module, "configure_callbacks", configure_callbacks)
    try:
        yield
    finally:
        restore()


@contextmanager
def quietly() -> Iterator[list[str]]:
    """What would be said in every run is not said; what the suite warns about is in the list, at the end."""
    warned: list[str] = []
    loggers = [log, logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", FastTrainWarning)
            yield warned
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        warned += [str(one.message) for one in caught]
