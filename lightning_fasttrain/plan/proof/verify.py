"""Whether a training step with techniques is the step without them, on a user's own model."""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fasttrain._checks import positive_int
from lightning_fasttrain._messages import explain
from lightning_fasttrain._predicted_step import PredictedStep
from lightning_fasttrain._surgery import first_line
from lightning_fasttrain.data.split_batch import reverse_rows, split_batch
from lightning_fasttrain.optim.named.build_optimizer import make_optimizer
from lightning_fasttrain.plan.proof import guards
from lightning_fasttrain.plan.proof.comparison import Allowance, compare
from lightning_fasttrain.plan.proof.step_record import StepRecord, Steps, copy_module, quietly, record_steps
from lightning_fasttrain.plan.proof.verification import Verification, Verified
from lightning_fasttrain.plan.proof.yardstick import (
    Distances,
    Meaning,
    find_meaning,
    measure_distances,
    nudge,
    take_largest,
)
from lightning_fasttrain.technique import Exactness, Technique, check_together
from lightning_fasttrain.technique.declarations import least_exact

Loss = Callable[[Any, Any], Any]

_FULL = "32-true"
_LOW = (torch.bfloat16, torch.float16)
_TIMES = 16.0  # what rounding does to a step is small and random; two steps may meet it at its two ends
_TIMES_ROUNDED = 3.0  # the distance of low precision from float32 is no small thing
_NO_YARDSTICK = 1e-3  # of the loss: turning the rows round does more than rounding would, so their order matters


def verify(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    techniques: Sequence[Technique] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str = _FULL,
    steps: int = 1,
    **settings: Any,
) -> Verification:
    """Run the same steps without and with techniques, on copies of a model, and say whether it is the same training.

    Compared are the loss, each parameter's gradient, what the optimizer adds to each weight, buffers, and the loss of
    the batch in evaluation. The yardstick is the rounding of the plain step itself on this model: how far it moves when
    each weight is moved to the next number, and when the batch's rows are turned round. Techniques that are *exact*
    must stay within a small multiple of that, those with a *tolerance* within their bound, and of those that *change
    training* the change is reported; what is used beside them is held to the step that they make. In low precision
    float32 is verified too, where rounding hides nothing, and then the precision itself, by its distance from float32.

    If the whole is another training each technique is run alone, so that the guilty one is named. Where a technique
    draws other masks of dropout, all steps are run without dropout, and a note says so.

    Args:
        module: left as it is, or a function that builds it. Memory is needed for a copy and a step at a time, and on
            the host for gradients and weights, three times.
        batch: as the loader gives it; or a ``DataLoader``, whose first ``steps`` batches are used.
        techniques: as for the Trainer; by default those that the module brings (``FastTrainMixin``).
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: as for the Trainer.
        steps: optimizer steps.
        settings: more of the Trainer's, for all runs, such as ``gradient_clip_val=1.0`` or ``accelerator="cpu"``.

    Returns:
        Rows, problems and notes; its ``ok`` is the verdict, its ``guilty`` names techniques.

    Raises:
        TypeError: no model, no loss or no optimizer, or a model that cannot be copied.
        ValueError: techniques that do not go together, or none.
        Exception: whatever the plain step raises.

    Example:
        >>> import lightning_fasttrain as ft
        >>> batch = torch.randn(8, 4), torch.randn(8, 1)
        >>> verified = ft.verify(
        ...     lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 1)),
        ...     batch,
        ...     [ft.MicroBatching(2), ft.ActivationCheckpointing()],
        ...     loss=lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]),
        ...     optimizer=torch.optim.AdamW,
        ...     accelerator="cpu",
        ... )
        >>> verified.ok, verified.rows[0].verdict
        (True, 'the same')

    Source:
        Ours. Perturbing weights by one rounding to learn what rounding does is an old method of numerical analysis:
        Chaitin-Chatelin & Frayssé 1996, "Lectures on Finite Precision Computations".
    """
    positive_int("steps", steps)
    plain = as_lightning_module(module, loss, optimizer)
    listed = _list_techniques(plain, techniques)
    batches = _take_batches(batch, steps)
    proof = _Proof(plain, batches, listed, settings)
    proof.run(precision)
    return Verification(_name_of(plain), tuple(proof.rows), _drop_repeats(proof.problems), _drop_repeats(proof.notes))


class _Supervised(L.LightningModule):
    """Any module with a loss and an optimizer, as a LightningModule."""

    def __init__(self, net: nn.Module, loss: Loss, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.make_optimizer, self)


def as_lightning_module(
    module: nn.Module | Callable[[], nn.Module], loss: Loss | None, optimizer: Callable[[Any], Optimizer] | None
) -> L.LightningModule:
    """The module itself if it is one that can train, or one around it.

    Raises:
        TypeError: no module, or no loss or optimizer for one that has none.
    """
    built = module if isinstance(module, nn.Module) else module()
    if not isinstance(built, nn.Module):
        way_out = "Give an nn.Module, or a function without arguments that returns one"
        raise TypeError(explain(f"module={module!r}, which gives {type(built).__name__}", "a model is needed", way_out))
    if isinstance(built, L.LightningModule) and loss is None and optimizer is None:
        return built
    if loss is None or optimizer is None:
        missing = "loss" if loss is None else "optimizer"
        why = "a step needs both, and only a LightningModule brings its own"
        way_out = f"Give {missing}= too: loss is a function of (module, batch), optimizer one of the parameters"
        raise TypeError(explain(f"{type(built).__name__} without {missing}=", why, way_out))
    return _Supervised(built, loss, optimizer)


def _in_float32(tensor: Tensor) -> Tensor:
    """A tensor of 16 bits in float32; others, float64 among them, as they are."""
    return tensor.float() if tensor.dtype in _LOW else tensor


@dataclass
class _Reference:
    """The steps that others are compared with, in one precision."""

    steps: Steps
    plain: StepRecord  # without techniques
    record: StepRecord  # with those that change training
    noise: Distances
    meaning: Meaning
    times: float


class _Proof:
    """One verification: what was found so far, and how records are made."""

    def __init__(
        self, module: L.LightningModule, batches: list[Any], techniques: list[Technique], settings: dict[str, Any]
    ) -> None:
        self.module, self.batches, self.settings = module, batches, settings
        self.all = techniques
        self.changing = [t for t in techniques if t.exactness is Exactness.CHANGES_TRAINING]
        self.keeping = [t for t in techniques if t.exactness is not Exactness.CHANGES_TRAINING]
        self.rows: list[Verified] = []
        self.problems: list[str] = []
        self.notes: list[str] = []

    def run(self, precision: str) -> None:
        with quietly():
            module = copy_module(self.module)
            module.configure_model()
            self.problems += guards.find_idle(module, copy.deepcopy(self.all))
        exact = self._refer_in_float32()
        self._judge(exact, _FULL)
        in_half = any(p.is_floating_point() and p.element_size() < 4 for p in self.module.parameters())
        if precision != _FULL or in_half:
            self._judge(self._refer_in(precision, exact), precision)

    def _refer_in_float32(self) -> _Reference:
        module, batches = copy_module(self.module), self.batches
        if any(parameter.dtype in _LOW for parameter in module.parameters()):
            batches = apply_to_collection(batches, Tensor, _in_float32)
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = _in_float32(tensor.data)
        steps = Steps(module, batches, {**self.settings, "precision": _FULL})
        plain = record_steps(steps)
        if plain.draws and not all(technique.keeps_draws for technique in self.keeping):
            steps = replace(steps, dropout=False)
            plain = record_steps(steps)
            self.notes.append("Dropout is off in all runs: some of these techniques draw other masks.")
        self.problems += guards.find_empty(plain)
        record = self._with_changes(steps, plain)
        noise = self._measure_noise(steps, record)
        self.problems += guards.find_unsteady(record, noise)
        return _Reference(steps, plain, record, noise, find_meaning(record, noise), _TIMES)

    def _refer_in(self, precision: str, exact: _Reference) -> _Reference:
        steps = replace(
            exact.steps, module=self.module, batches=self.batches, settings={**self.settings, "precision": precision}
        )
        plain = record_steps(steps)
        record = self._with_changes(steps, plain)
        # Of all entries first, to find which of them mean something; then of those alone, as they are compared.
        noise = measure_distances(exact.record, record, {})
        meaning = find_meaning(record, noise)
        noise = measure_distances(exact.record, record, meaning)
        return _Reference(steps, plain, record, noise, meaning, _TIMES_ROUNDED)

    def _with_changes(self, steps: Steps, plain: StepRecord) -> StepRecord:
        return record_steps(steps, self.changing) if self.changing else plain

    def _measure_noise(self, steps: Steps, record: StepRecord) -> Distances:
        # Two, because one alone may move a tensor little by chance.
        moved = [record_steps(steps, self.changing, change=nudge(seed)) for seed in range(2)]
        turned = self._turn_rows(steps, record)
        noisy = [*moved, turned] if turned is not None else moved
        meaning = find_meaning(record, take_largest(measure_distances(record, other, {}) for other in noisy))
        return take_largest(measure_distances(record, other, meaning) for other in noisy)

    def _turn_rows(self, steps: Steps, record: StepRecord) -> StepRecord | None:
        """The same steps with the rows in reverse order, if that is the same step but for rounding."""
        if record.draws and steps.dropout:
            return None
        with suppress(ValueError):  # a batch without rows
            turned = record_steps(replace(steps, batches=[reverse_rows(b) for b in steps.batches]), self.changing)
            apart = [abs(a - b) for a, b in zip(record.losses, turned.losses, strict=True)]
            if max(apart) <= _NO_YARDSTICK * max(map(abs, record.losses)):
                return turned
        return None

    def _judge(self, reference: _Reference, precision: str) -> None:
        """Compare all techniques with the reference, and each alone if they are not the same together."""
        if self.changing:
            self._report_changes(reference, precision)
        comparable = self._leave_out_drawing(reference)
        exact = [technique for technique in comparable if technique.exactness is Exactness.EXACT]
        together = [comparable]
        if 0 < len(exact) < len(comparable):  # the bound of the others would hide what is wrong with these
            together = [exact, comparable]
        wholes = [self._try(reference, precision, techniques) for techniques in together if techniques]
        self.rows += wholes
        if all(row.ok for row in wholes) or len(comparable) < 2:  # one alone has been tried
            return
        alone = [self._try(reference, precision, [technique]) for technique in comparable]
        self.rows += alone
        # Each keeps its promise alone, so the fault lies between some of them.
        if all(row.ok for row in alone):
            self._name_what_does_not_go_together(reference, precision, comparable)

    def _leave_out_drawing(self, reference: _Reference) -> list[Technique]:
        if not reference.record.draws or reference.steps.dropout:
            return self.keeping
        kept = [technique for technique in self.keeping if technique.keeps_draws]
        for technique in self.keeping:
            if not technique.keeps_draws:
                why = "the step draws random numbers that are not dropout's, and this technique draws others"
                way_out = "Draw them in the dataset, or from a generator that the batch seeds"
                self.problems.append(f"{type(technique).__name__} cannot be compared: {why}. {way_out}.")
        return kept

    def _report_changes(self, reference: _Reference, precision: str) -> None:
        plain, record, noise = reference.plain, reference.record, reference.noise
        distances = compare(plain, record, {}, Allowance(noise, reference.times, None))
        what = Exactness.CHANGES_TRAINING.value
        self.rows.append(Verified(tuple(map(str, self.changing)), precision, what, tuple(distances)))
        self.problems += guards.find_empty(record)
        self.problems += guards.find_unheld(plain, record)
        self.problems += guards.find_stuck(plain, record)
        self.notes += record.left
        self.problems += [f"{name} did nothing: {why}." for name, why in record.idle.items()]
        if precision == _FULL:
            if plain.trains != record.trains:  # with another loss, such as a teacher's, evaluation has its own
                self.problems += guards.find_unlike_evaluation(plain, record, noise)
            self.problems += guards.find_changed_base(plain, record, noise)
        self.notes += record.warnings

    def _try(self, reference: _Reference, precision: str, techniques: list[Technique]) -> Verified:
        exactness = least_exact(*(technique.exactness for technique in techniques))
        names = tuple(map(str, techniques))
        try:
            steps, window = _cut_into_windows(reference.steps, techniques)
            record = record_steps(steps, [*self.changing, *techniques], window=window)
        except Exception as error:
            return Verified(names, precision, exactness.value, failure=first_line(error))
        bound = sum(technique.bound for technique in techniques)  # errors add up, at worst
        allow = Allowance(reference.noise, reference.times, bound)
        distances = compare(reference.record, record, reference.meaning, allow)
        self.problems += guards.find_unheld(reference.record, record)
        self.problems += guards.find_without_gradient(reference.record, record)
        if precision == _FULL:
            self.problems += guards.find_unlike_evaluation(reference.record, record, reference.noise, bound)
        self.problems += [f"{name} did nothing: {why}." for name, why in record.idle.items()]
        self.notes += record.warnings
        return Verified(names, precision, exactness.value, tuple(distances))

    def _name_what_does_not_go_together(
        self, reference: _Reference, precision: str, techniques: list[Technique]
    ) -> None:
        for pair in itertools.combinations(techniques, 2):
            row = self._try(reference, precision, list(pair))
            if not row.ok:
                self.rows.append(row)
                return


def _cut_into_windows(steps: Steps, techniques: list[Technique]) -> tuple[Steps, int]:
    """Where techniques make one step of several batches, each batch becomes that many parts."""
    planned = PredictedStep()
    for technique in copy.deepcopy(techniques):  # a user's own may do anything in predict
        with suppress(ValueError):  # one that cannot be predicted
            technique.predict(planned)
    if planned.window == 1:
        return steps, 1
    parts = [split_batch(batch, planned.window) for batch in steps.batches]
    return replace(steps, batches=list(itertools.chain.from_iterable(parts))), planned.window


def _list_techniques(module: L.LightningModule, techniques: Sequence[Technique] | None) -> list[Technique]:
    if techniques is None:
        brought: Any = module.configure_callbacks()
        listed = brought if isinstance(brought, Sequence) else [brought]
        techniques = [callback for callback in listed if isinstance(callback, Technique)]
    if not techniques:
        why = "there is nothing to compare the plain step with"
        raise ValueError(explain("techniques=[]", why, "Give some: [ft.MicroBatching(4)]"))
    return check_together(techniques)


def _take_batches(batch: Any, steps: int) -> list[Any]:
    if not isinstance(batch, DataLoader):
        return [apply_to_collection(batch, Tensor, torch.clone) for _ in range(steps)]
    batches = list(itertools.islice(batch, steps))
    if len(batches) < steps:
        why = f"the loader has {len(batches)} batches"
        raise ValueError(explain(f"steps={steps}", why, f"Use steps={max(1, len(batches))}"))
    return batches


def _name_of(module: L.LightningModule) -> str:
    return type(module.net).__name__ if isinstance(module, _Supervised) else type(module).__name__


def _drop_repeats(sentences: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))
