"""Explain for each unused technique why it cannot act, or predict how much memory it would save."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.batch import kind_of_batch
from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.host.lightning import list_callbacks
from lightning_fasttrain.core.messages import Report, ReportTable, describe_error, explain, format_bytes
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.memory.fake_step import Factory, fake_model
from lightning_fasttrain.memory.memory_report import MemoryReport
from lightning_fasttrain.memory.predict_memory import PREDICTED_PRECISIONS, Loss, predict_memory
from lightning_fasttrain.micro_batching import MicroBatching
from lightning_fasttrain.model import LowPrecisionProducts
from lightning_fasttrain.model.kernels.low_precision_products import usual_kind
from lightning_fasttrain.planner.candidates import known_techniques
from lightning_fasttrain.proof.verification.short_run import quietly
from lightning_fasttrain.technique import Exactness, Technique, check_together
from lightning_fasttrain.technique.declarations import (
    Facts,
    PredictedStep,
    add_model,
    describe_clipping,
    facts_of_machine,
)
from lightning_fasttrain.technique.run_summary import padding_of
from lightning_fasttrain.technique.technique import find_with_surgery, techniques_of


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
        one_of("precision", precision, PREDICTED_PRECISIONS)
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


@dataclass(frozen=True)
class Unused:
    """A technique that is not in use.

    Args:
        name: name of its class.
        why_not: why it cannot, or need not, act here; None if there is no reason against it.
        when: when it pays in general.
        tried: the call whose memory was predicted; "" if none was.
        factor: predicted peak with the technique divided by that without; None if it was not predicted.
        gain: the least factor that is expected, on memory as predicted, or on time until that is measured.
        changes_training: whether it changes what is learned.
    """

    name: str
    why_not: str | None
    when: str
    tried: str = ""
    factor: float | None = None
    gain: float = 1.0
    changes_training: bool = False


@dataclass(frozen=True)
class UnusedReport(Report):
    """Techniques that are not in use; ``print`` shows a table.

    Args:
        rows: the techniques that may be worth trying, by expected gain, those that keep the training first; then those
            that cannot act.
        used: names of the techniques in use.
        peak_bytes: predicted peak with the techniques in use; None if nothing was predicted.
        device: type of the device.
        precision: Lightning's name of the precision.
        notes: explanations of missing predictions.
        most: rows of the table; None for all.
    """

    rows: tuple[Unused, ...]
    used: tuple[str, ...]
    peak_bytes: int | None
    device: str
    precision: str
    notes: tuple[str, ...] = ()
    most: int | None = 10

    def as_table(self) -> ReportTable:
        """Build the table of the memory with each technique, and of the reasons against it."""
        peak = ""
        if self.peak_bytes is not None:
            peak = f", predicted peak {format_bytes(self.peak_bytes)}"
        used = ", ".join(self.used) or "nothing"
        title = f"Not in use on {self.device}, {self.precision}; in use: {used}{peak}"
        columns = {"technique": "name", "peak": "number", "why not, or when it pays": "prose"}
        left = 0 if self.most is None else max(0, len(self.rows) - self.most)
        notes = [*self.notes]
        if left:
            idle = sum(row.why_not is not None for row in self.rows[-left:])
            notes.append(f"{left} more, of which {idle} cannot act: see rows, or --all of the command.")
        table = ReportTable(title, columns, notes)
        for row in self.rows[: len(self.rows) - left]:
            factor = "" if row.factor is None else f"×{row.factor:.2f}"
            says, style = f"pays when {row.when}", ""
            if row.why_not is not None:
                says, style = row.why_not, "dim"
            table.add(row.tried or row.name, factor, says, style=style)
        return table


_REFUSED = (TypeError, ValueError, ModuleNotFoundError)


@check_arguments
def why_not(
    module: nn.Module | Factory | L.Trainer,
    batch: object = None,
    techniques: Sequence[Technique] | None = None,
    *,
    trainer: L.Trainer | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str = "32-true",
) -> UnusedReport:
    """Say of every technique that is not in use why it cannot, or need not, act here, and what it would bring.

    Reasons are the techniques' own: of this machine, of the model, of how the Trainer is set, of what is in use beside
    them, or what they would raise when they operate on the model, which is tried on a copy without memory.

    Args:
        module: a model, or a function that builds it, left as it is; or a Trainer that has met its model.
        batch: one rank's batch, as the loader gives it: what changes a step's memory is then predicted, each in
            seconds, with the arguments that its row names.
        techniques: those in use; by default the Trainer's, and those that the module brings (``FastTrainMixin``).
        trainer: says on how many devices, by which strategy and in which precision.
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: where there is no Trainer.

    Returns:
        First what may be worth trying, what keeps the training before what changes it, by expected gain; its ``rows``
        are all, and printed it shows ten.

    Raises:
        TypeError, ValueError: techniques that are none, or do not go together; an unknown precision; a model that
            cannot be copied; a Trainer that has no model yet.

    Example:
        >>> import lightning_fasttrain as ft
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        >>> reasons = {row.name: row.why_not for row in ft.planner.why_not(net, techniques=[ft.QLoRA()]).rows}
        >>> reasons["QuantizedBase"]
        'QLoRA + QuantizedBase: QLoRA is QuantizedBase and LoRA already. Use QLoRA alone, or ...'

    Source:
        Ours.
    """
    setup = find_setup(module, techniques, trainer, precision)
    with quietly():
        asker = _Asker(setup, batch, loss, optimizer)
        rows = [asker.ask(kind) for kind in known_techniques() if kind not in map(type, setup.techniques)]
    rows.sort(key=lambda row: (row.why_not is not None, row.changes_training, row.gain))
    used = tuple(type(technique).__name__ for technique in setup.techniques)
    padding = padding_of(setup.techniques)
    if batch is not None and padding is not None:
        padding.add(batch)
        asker.notes += filter(None, [str(padding)])
    return UnusedReport(tuple(rows), used, asker.peak_bytes, setup.device.type, setup.precision, tuple(asker.notes))


class _Asker:
    """Asks techniques about one setup.

    Attributes:
        peak_bytes: predicted peak of a step with the techniques in use; None if it is not predicted.
        notes: explanations of missing predictions.
    """

    def __init__(
        self, setup: TrainingSetup, batch: object, loss: Loss | None, optimizer: Callable[[Any], Optimizer] | None
    ) -> None:
        self.setup, self.step = setup, (batch, loss, optimizer)
        self.notes: list[str] = []
        self.peak_bytes: int | None = None
        planned = PredictedStep(setup.precision, setup.predicted_device == "cuda")
        with fake_model(setup.module, find_with_surgery(setup.techniques, planned)) as copy:
            self.facts = _facts(setup, copy)
        if batch is not None:
            self.facts = replace(self.facts, batch=kind_of_batch(batch))
        if batch is None:
            return
        try:
            self.peak_bytes = setup.predict(*self.step).peak_bytes
        except _REFUSED as error:
            self.notes.append(f"Nothing is predicted: {error}")

    def ask(self, kind: type[Technique]) -> Unused:
        costs = [setting.cost for setting in kind.worth_trying if setting.device in ("", self.facts.device)]
        changes = kind.exactness is Exactness.CHANGES_TRAINING
        row = Unused(
            kind.__name__, kind.why_not(self.facts), kind.when, gain=min([1.0, *costs]), changes_training=changes
        )
        if row.why_not is not None:
            return row
        try:
            made = self._make(kind)
            if made is None:
                return row
            check_together([*self.setup.techniques, made], self._strategy)
            if self.peak_bytes is not None and self._changes_memory(made):
                predicted = self.setup.predict(*self.step, [*self.setup.techniques, made])
                factor = predicted.peak_bytes / self.peak_bytes
                return replace(row, tried=repr(made), factor=factor, gain=min(row.gain, factor))
            if made.surgery is not None:
                # Nothing is done with the copy: to operate on it shows whether the technique refuses.
                with fake_model(self.setup.module, [made]):
                    pass
        except _REFUSED as error:
            return replace(row, why_not=str(error))
        except Exception as error:  # of the user's step, which runs with this technique for the first time
            return replace(row, why_not=describe_error(error))
        return row

    @property
    def _strategy(self) -> Strategy | None:
        return None if self.setup.trainer is None else self.setup.trainer.strategy

    def _make(self, kind: type[Technique]) -> Technique | None:
        """Make a technique with its default arguments; None if it requires some."""
        if kind is MicroBatching:
            return MicroBatching(4)
        if kind is LowPrecisionProducts:
            return LowPrecisionProducts(usual_kind())
        needed = [p for p in inspect.signature(kind).parameters.values() if p.default is inspect.Parameter.empty]
        return None if needed else kind()

    def _changes_memory(self, made: Technique) -> bool:
        plain = PredictedStep(self.setup.precision, self.setup.predicted_device == "cuda")
        # The copy has lists of its own, or `plain` would change with it.
        planned = replace(plain, on_optimizer=[], notes=[])
        operates = made.predict(planned) is not None
        return operates or replace(planned, notes=[]) != plain  # a note alone changes nothing


def _facts(setup: TrainingSetup, model: nn.Module) -> Facts:
    trained, parameters = count_parameters(model)
    trainer = setup.trainer
    facts = replace(
        add_model(facts_of_machine(), model),
        device=setup.device.type,
        trains=trained / max(parameters, 1),
        precision=setup.precision,
    )
    if trainer is None:
        return facts
    clips = describe_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    return replace(facts, devices=trainer.world_size, accumulates=trainer.accumulate_grad_batches, clips=clips)
