"""Check that a training step with techniques is the same as without them, on a user's own model."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fasttrain.core.batch import count_bytes
from lightning_fasttrain.core.batch.leaves import batch_size, pick_rows, reverse_rows, split_batch
from lightning_fasttrain.core.checks import Batch, PositiveInt, check_arguments
from lightning_fasttrain.core.device import free_bytes, is_out_of_memory, return_unused_memory
from lightning_fasttrain.core.host.lightning import list_callbacks
from lightning_fasttrain.core.messages import describe_error, explain, format_bytes
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.core.modules.wrapped_forward import has_dropout
from lightning_fasttrain.memory.predict_memory import Loss, predict_memory
from lightning_fasttrain.optim.named.build_optimizer import make_optimizer
from lightning_fasttrain.proof.verification import compare_records
from lightning_fasttrain.proof.verification.compare_records import (
    Allowance,
    Distances,
    Meaning,
    compare,
    find_meaning,
    measure_distances,
    nudge,
    take_largest,
)
from lightning_fasttrain.proof.verification.first_difference import FirstDifference, find_first_difference
from lightning_fasttrain.proof.verification.record_steps import StepRecord, record_steps
from lightning_fasttrain.proof.verification.report import Verification, Verified
from lightning_fasttrain.proof.verification.short_run import Steps, copy_module, quietly
from lightning_fasttrain.technique import Capability, Exactness, Technique, check_together
from lightning_fasttrain.technique.declarations import least_exact
from lightning_fasttrain.technique.technique import predict_window
from lightning_fasttrain.trial.sample_rows import rank_rows

FULL = "32-true"
_TIMES = 16.0  # the effect of rounding on a step is small and random; two steps may lie at opposite ends of it
_TIMES_ROUNDED = 3.0  # the distance of low precision from float32 is much larger
_ORDER_MATTERS = 1e-3  # of the loss: reversing the rows changes it by more than rounding, so their order matters


@dataclass
class _Reference:
    """The steps with which others are compared, in one precision."""

    steps: Steps
    plain: StepRecord  # without techniques
    record: StepRecord  # with techniques that change training
    noise: Distances
    meaning: Meaning
    times: float


class Proof:
    """One verification: its findings so far, and how records are made.

    Args:
        steps: steps of the plain side, in the user's own precision; their ``validation`` may be a guess.
        techniques: all techniques.
        validation_given: whether the validation batch is the user's, and not the first training batch.
        batches_derived: whether the batches after the first were made from its rows.
        store: a folder for all entries of all tensors; None if a sample of them is enough.
        operators: whether to report the first operator that differs, not only the first module.
    """

    def __init__(
        self,
        steps: Steps,
        techniques: list[Technique],
        *,
        validation_given: bool,
        batches_derived: bool,
        store: Path | None,
        operators: bool = False,
    ) -> None:
        self.steps = steps
        self.validation_given = validation_given
        self.batches_derived = batches_derived
        self.store = store
        self.operators = operators
        self.all = techniques
        self.changing = [t for t in techniques if t.exactness is Exactness.CHANGES_TRAINING]
        self.keeping = [t for t in techniques if t.exactness is not Exactness.CHANGES_TRAINING]
        self.rows: list[Verified] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.idle: set[str] = set()
        self.begins: FirstDifference | None = None

    def run(self, precision: str) -> None:
        with quietly():
            module = copy_module(self.steps.module)
            module.configure_model()
            self.idle = compare_records.find_idle(module, copy.deepcopy(self.all))
            del module
        return_unused_memory()
        self.problems += [f"{name} changed nothing." for name in map(str, self.all) if name in self.idle]
        exact = self._refer_in_float32()
        self._judge(exact, FULL)
        self._find_where_it_begins(exact)
        in_half = any(p.is_floating_point() and p.element_size() < 4 for p in self.steps.module.parameters())
        if precision != FULL or in_half:
            self._judge(self._refer_in(precision, exact), precision)

    def _refer_in_float32(self) -> _Reference:
        steps = replace(self.steps, in_float32=True, settings={**self.steps.settings, "precision": FULL})
        if not all(technique.keeps_draws for technique in self.keeping):
            steps = replace(steps, dropout=False)
            if has_dropout(steps.module):
                self.notes.append("Dropout is off in all runs, since some of these techniques draw different masks.")
        steps = self._take_rows_that_fit(steps)
        plain, steps = self._record_plain(steps)
        self.problems += compare_records.find_empty(plain)
        record = self._with_changes(steps, plain)
        noise = self._measure_noise(steps, record)
        self.problems += compare_records.find_unsteady(record, noise)
        return _Reference(steps, plain, record, noise, find_meaning(record, noise), _TIMES)

    def _take_rows_that_fit(self, steps: Steps) -> Steps:
        rows = fit_rows(steps.module, steps.batches, _device_of(steps.settings))
        if rows is None:
            return steps
        return self._take_fewer_rows(steps, rows, "is predicted not to fit")

    def _take_fewer_rows(self, steps: Steps, rows: int, why: str) -> Steps:
        most = max(map(count_rows, steps.batches))
        what = f"The steps use {rows} of the batch's {most} rows, chosen to differ"
        self.notes.append(f"{what}: the plain step with all of them {why} into memory.")
        validation = steps.validation
        if validation is not None:
            validation = keep_rows([validation], rows)[0]
        return replace(steps, batches=keep_rows(steps.batches, rows), validation=validation)

    def _record_plain(self, steps: Steps) -> tuple[StepRecord, Steps]:
        """Record the plain steps; with fewer rows if they do not fit, without validation if it fails."""
        while True:
            try:
                # The plain model's loss before the first step is that of the base model below adapters.
                plain = record_steps(steps, from_start=bool(self.changing), store=self._folder("plain"))
                if not self.batches_derived or all(map(math.isfinite, plain.losses)):
                    return plain, steps
                self.batches_derived = False
                steps = replace(steps, batches=[steps.batches[0]] * len(steps.batches))
                self.notes.append("All steps see the same batch: the loss of the first half of its rows is not finite.")
                continue
            except Exception as error:
                rows = max(map(count_rows, steps.batches)) // 2 if is_out_of_memory(error) else None
                if rows == 0 or (rows is None and (steps.validation is None or self.validation_given)):
                    raise
            # Outside of the handlers, whose exceptions keep the step's memory alive.
            if rows is not None:
                return_unused_memory()
                steps = self._take_fewer_rows(steps, rows, "does not fit")
            else:
                steps = replace(steps, validation=None)
                self.notes.append("Validation is not compared: it fails on a training batch. Pass validation= a batch.")

    def _folder(self, name: str) -> Path | None:
        if self.store is None:
            return None
        folder = self.store / f"{name}-{len(list(self.store.iterdir()))}"
        folder.mkdir()
        return folder

    def _refer_in(self, precision: str, exact: _Reference) -> _Reference:
        settings = {**self.steps.settings, "precision": precision}
        steps = replace(exact.steps, in_float32=False, settings=settings)
        plain = record_steps(steps, store=self._folder("plain"))
        record = self._with_changes(steps, plain)
        # First over all entries, to find the significant ones; then over those alone, as they are compared.
        noise = measure_distances(exact.record, record, {})
        meaning = find_meaning(record, noise)
        noise = measure_distances(exact.record, record, meaning)
        return _Reference(steps, plain, record, noise, meaning, _TIMES_ROUNDED)

    def _with_changes(self, steps: Steps, plain: StepRecord) -> StepRecord:
        if not self.changing:
            return plain
        return record_steps(steps, self.changing, store=self._folder("changed"))

    def _measure_noise(self, steps: Steps, record: StepRecord) -> Distances:
        """Measure twice, because one perturbation alone may change a tensor little by chance."""
        first, second = self._record_noise(steps, nudge(0)), self._turn_rows(steps, record)
        if second is None:
            second = self._record_noise(steps, nudge(1))

        def measure(meaning: Meaning) -> Distances:
            return take_largest(measure_distances(record, noisy, meaning) for noisy in (first, second))

        return measure(find_meaning(record, measure({})))

    def _record_noise(self, steps: Steps, change: Callable[[nn.Module], None] | None) -> StepRecord:
        return record_steps(steps, self.changing, change=change, evaluates=False, store=self._folder("noise"))

    def _turn_rows(self, steps: Steps, record: StepRecord) -> StepRecord | None:
        """Record the same steps with the rows in reverse order, if that gives the same step up to rounding."""
        if record.draws and steps.dropout:
            return None
        with suppress(ValueError):  # a batch without rows
            reversed_steps = replace(steps, batches=list(map(reverse_rows, steps.batches)), validation=None)
            turned = self._record_noise(reversed_steps, None)
            apart = [abs(a - b) for a, b in zip(record.losses, turned.losses, strict=True)]
            if max(apart, default=0.0) <= _ORDER_MATTERS * max(map(abs, record.losses), default=0.0):
                # Its evaluation has the rows in another order, and so has the module's own state about them.
                return turned
        return None

    def _judge(self, reference: _Reference, precision: str) -> None:
        """Compare all techniques with the reference, and each alone if they are not the same together."""
        if self.changing:
            self._report_changes(reference, precision)
        comparable = self._leave_out_drawing(reference)
        exact = [technique for technique in comparable if technique.exactness is Exactness.EXACT]
        together = [comparable]
        # Exact techniques are tried apart, since the bound of the others would hide their errors.
        if 0 < len(exact) < len(comparable):
            together = [exact, comparable]
        wholes = [self._try(reference, precision, techniques) for techniques in together if techniques]
        self.rows += wholes
        # A single technique has been tried alone already.
        if all(row.ok for row in wholes) or len(comparable) < 2:
            return
        alone = [self._try(reference, precision, [technique]) for technique in comparable]
        self.rows += alone
        # Each technique is correct alone, so the fault lies between some of them.
        if all(row.ok for row in alone):
            self._find_conflicting_pair(reference, precision, comparable)

    def _find_where_it_begins(self, reference: _Reference) -> None:
        """Locate the difference for the last row with different training: the one with the fewest techniques."""
        wrong = [row for row in self.rows if row.is_another_training]
        if not wrong:
            return
        techniques = [technique for technique in self.keeping if str(technique) in wrong[-1].techniques]
        steps, window = _cut_into_windows(reference.steps, techniques)
        try:
            usual, other = (reference.steps, self.changing), (steps, [*self.changing, *techniques])
            self.begins = find_first_difference(usual, other, window, nudge(0), self.operators)
        except Exception as error:
            self.notes.append(f"The first difference could not be located: {describe_error(error)}.")

    def _leave_out_drawing(self, reference: _Reference) -> list[Technique]:
        if not reference.record.draws or reference.steps.dropout:
            return self.keeping
        kept: list[Technique] = []
        for technique in self.keeping:
            if technique.keeps_draws:
                kept.append(technique)
                continue
            why = "the step draws random numbers besides dropout, and this technique changes the draws"
            way_out = "Draw them in the dataset, or from a generator seeded by the batch"
            self.problems.append(f"{type(technique).__name__} cannot be compared: {why}. {way_out}.")
        return kept

    def _report_changes(self, reference: _Reference, precision: str) -> None:
        plain, record, noise = reference.plain, reference.record, reference.noise
        distances = compare(plain, record, {}, Allowance(noise, reference.times, None))
        what = Exactness.CHANGES_TRAINING.value
        self.rows.append(Verified(tuple(map(str, self.changing)), precision, what, tuple(distances)))
        self.problems += compare_records.find_empty(record)
        self.problems += compare_records.find_unheld(plain, record)
        self.problems += compare_records.find_stuck(plain, record)
        self.notes += record.left
        self._note_idle(record)
        if precision == FULL:
            # With another loss, such as distillation, evaluation differs too.
            if plain.trains != record.trains:
                self.problems += compare_records.find_unlike_evaluation(plain, record, noise)
            self.problems += compare_records.find_changed_base(plain, record, noise)
        self.notes += record.warnings

    def _try(self, reference: _Reference, precision: str, techniques: list[Technique]) -> Verified:
        exactness = least_exact(*(technique.exactness for technique in techniques))
        names = tuple(map(str, techniques))
        try:
            steps, window = _cut_into_windows(reference.steps, techniques)
            acting = [*self.changing, *techniques]
            record = record_steps(steps, acting, window=window, store=self._folder("techniques"))
        except Exception as error:
            return Verified(names, precision, exactness.value, failure=describe_error(error))
        bound = sum(technique.bound for technique in techniques)  # errors add up, at worst
        evaluates_averages = any(technique.does(Capability.EVALUATES_AVERAGES) for technique in techniques)
        validates = precision == FULL and exactness is Exactness.EXACT and not evaluates_averages
        allow = Allowance(reference.noise, reference.times, bound, validates)
        distances = compare(reference.record, record, reference.meaning, allow)
        problems = compare_records.find_unheld(reference.record, record)
        problems += compare_records.find_without_gradient(reference.record, record)
        problems += compare_records.find_other_conduct(reference.record, record)
        if precision == FULL:
            problems += compare_records.find_unlike_evaluation(reference.record, record, reference.noise, bound)
        self._note_idle(record)
        self.problems += problems
        self.notes += record.warnings
        did_nothing = self.idle.issuperset(names)
        return Verified(names, precision, exactness.value, tuple(distances), "", tuple(problems), did_nothing)

    def _note_idle(self, record: StepRecord) -> None:
        self.idle |= set(record.idle)
        self.problems += [f"{name} did nothing: {why}." for name, why in record.idle.items()]

    def _find_conflicting_pair(self, reference: _Reference, precision: str, techniques: list[Technique]) -> None:
        for pair in itertools.combinations(techniques, 2):
            row = self._try(reference, precision, list(pair))
            if not row.ok:
                self.rows.append(row)
                return


def _cut_into_windows(steps: Steps, techniques: list[Technique]) -> tuple[Steps, int]:
    """Split each batch into micro-batches if techniques make one step of several batches."""
    # A user's own technique may do anything in predict.
    window = predict_window(copy.deepcopy(techniques))
    if window == 1:
        return steps, 1
    batches: list[Any] = []
    for batch in steps.batches:
        batches += split_batch(batch, window)
    return replace(steps, batches=batches), window


def _device_of(settings: Mapping[str, object]) -> torch.device:
    """Return the one device on which a Trainer with these settings runs."""
    accelerator, devices = settings.get("accelerator", "auto"), settings.get("devices", 1)
    on_cuda = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    if on_cuda and torch.cuda.is_available():
        return torch.device("cuda", devices[0] if isinstance(devices, list) else 0)
    return torch.device("cpu")


_SHARE = 0.9  # of the free memory: margin for errors of the prediction
# More bytes than a step takes per byte of weights or of its batch; if that fits, nothing is predicted.
_PER_WEIGHT, _PER_BATCH = 64, 2**16


def take_batches(batch: object, steps: int) -> tuple[list[Any], list[str]]:
    """Return a batch for each step, distinct from one step to the next where possible, and notes about them.

    Raises:
        ValueError: the loader has too few batches.
    """
    if isinstance(batch, DataLoader):
        batches = list(itertools.islice(batch, steps))
        if len(batches) < steps:
            why = f"the loader has {len(batches)} batches"
            raise ValueError(explain(f"steps={steps}", why, f"Use steps={max(1, len(batches))}"))
        return batches, []
    batches = [apply_to_collection(batch, Tensor, torch.clone)]
    if steps == 1:
        return batches, []
    with suppress(ValueError):  # a batch without rows
        size = batch_size(batch)
        if size > 1:
            # The first half of the rows, each twice: the same batch size with other sums and other counts.
            other = pick_rows(batch, [row // 2 for row in range(size)])
            return list(itertools.islice(itertools.cycle([*batches, other]), steps)), []
    return batches * steps, ["All steps see the same batch: it has no rows from which to make another one."]


def take_validation(batch: object, training: object) -> Any:
    """Return the batch for validation: the first of a loader, by default the first training batch."""
    if batch is None:
        return training
    return next(iter(batch)) if isinstance(batch, DataLoader) else batch


def fit_rows(module: L.LightningModule, batches: Sequence[object], device: torch.device) -> int | None:
    """Return how many rows of the largest batch a plain step can process; None for all, or if unknown.

    Args:
        module: the module, which is not changed.
        batches: the batches of the steps.
        device: the device on which they would run, with its current free memory.

    Raises:
        ValueError: not even one row fits.
    """
    free, size = free_bytes(device), max(map(count_rows, batches))
    weights = bytes_of((*module.parameters(), *module.buffers()))
    largest = max(batches, key=count_rows)
    if free is None or size < 2 or _PER_WEIGHT * weights + _PER_BATCH * count_bytes(largest) < free:
        return None
    # The first run is in float32, whatever the dtype of the weights.
    narrowest = min((p.element_size() for p in module.parameters() if p.is_floating_point()), default=4)
    rows, times = size, max(1.0, 4 / narrowest)
    while (nbytes := _predict(module, pick_rows(largest, list(range(rows))), device, times)) is not None:
        if nbytes <= _SHARE * free:
            return None if rows == size else rows
        if rows == 1:
            why = f"it takes {format_bytes(nbytes)} (predicted), and {format_bytes(free)} are free"
            way_out = "Verify a smaller model of the same kind, or pass shorter samples"
            raise ValueError(explain("a plain step of one row", why, way_out))
        rows = max(1, int(rows * min(0.5, _SHARE * free / nbytes)))
    return None


def keep_rows(batches: Sequence[object], rows: int) -> list[Any]:
    """Keep ``rows`` rows of each batch, those that differ most from one another first."""
    kept = []
    for batch in batches:
        size = count_rows(batch)
        if size > rows:
            batch = pick_rows(batch, sorted(rank_rows(batch, size)[:rows]))
        kept.append(batch)
    return kept


def count_rows(batch: object) -> int:
    """Return the number of rows of a batch; 1 if it cannot be split."""
    try:
        return batch_size(batch)
    except ValueError:
        return 1


def _predict(module: L.LightningModule, batch: object, device: torch.device, times: float) -> int | None:
    try:
        with quietly():
            return int(times * predict_memory(module, batch, device=device.type).peak_bytes)
    except Exception:  # errors of the module too, which may need real values
        return None


@check_arguments
def verify(
    module: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    techniques: Sequence[Technique] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str = FULL,
    steps: PositiveInt = 2,
    validation: Batch | None = None,
    full: bool = False,
    operators: bool = False,
    **settings: object,
) -> Verification:
    """Run the same steps with and without techniques, on copies of a model, and check that training is the same.

    The comparison covers the loss, each parameter's gradient in each step, the optimizer's updates, buffers, the loss
    of the batch in evaluation, and the results of validation and ``predict_step``; further, which weights are frozen,
    which modules are in training mode, random states, the entries of ``state_dict``, and hooks that are left behind.
    The limit is the rounding noise of the plain step on this model: how far it moves when each weight is moved to the
    next representable value, and when the rows of the batch are reversed. *Exact* techniques must stay within a small
    multiple of it, those with a *tolerance* within their bound, and for those that *change training* the change is
    reported; other techniques are compared with the step that these make. Low precision is verified in float32 too,
    where rounding hides nothing, and then by its distance from float32.

    If training differs, each technique is run alone, to name the guilty one; its steps are run once more with hooks on
    each module, to locate the first difference. If a technique draws different dropout masks, all steps are run
    without dropout, with a note.

    One copy of the model at a time is in memory besides the given one. For each tensor a checksum, 4,096 entries and
    512 random sums over all entries are kept: a difference that affects few entries of an update, and no gradient, may
    be missed without ``full=True``. If the plain step does not fit the device, as predicted or as found out, fewer
    rows are compared, with a note.

    Args:
        module: the module, which is not changed, or a function that builds it.
        batch: a batch of the loader; every second step uses the first half of its rows twice. Or a ``DataLoader``,
            whose first ``steps`` batches are used.
        techniques: as for the Trainer; by default those that the module brings (``FastTrainMixin``).
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: as for the Trainer.
        steps: number of optimizer steps; errors from the third step on are found with ``steps=3``.
        validation: a batch for ``validation_step`` and ``predict_step``, or a loader of them; by default the training
            batch, if the module accepts it.
        full: whether all entries of all tensors are compared; they are kept in temporary files.
        operators: whether to locate the first operator that differs, not only the first module.
        settings: further Trainer settings for all runs, such as ``gradient_clip_val=1.0`` or ``accelerator="cpu"``.

    Returns:
        Rows, problems and notes; ``ok`` is the verdict, ``guilty`` lists techniques, ``begins`` is a module or weight.

    Raises:
        TypeError: no model, no loss or no optimizer was given, or the model cannot be copied.
        ValueError: the techniques conflict, or there are none; or not even one row fits into memory.
        Exception: any error of the plain step.

    Example:
        >>> import torch
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
        Ours. Perturbing weights by one rounding to measure the effect of rounding is an old method of numerical
        analysis: Chaitin-Chatelin & Frayssé 1996, "Lectures on Finite Precision Computations".
    """
    plain = as_lightning_module(module, loss, optimizer)
    listed = _list_techniques(plain, techniques)
    batches, notes = take_batches(batch, steps)
    of = Steps(plain, batches, settings, validation=take_validation(validation, batches[0]))
    with TemporaryDirectory() if full else nullcontext() as folder:
        proof = Proof(
            of,
            listed,
            validation_given=validation is not None,
            batches_derived=not isinstance(batch, DataLoader),
            store=Path(folder) if folder else None,
            operators=operators,
        )
        proof.run(precision)
    problems, said = _drop_repeats(proof.problems), _drop_repeats([*notes, *proof.notes])
    return Verification(_name_of(plain), tuple(proof.rows), problems, said, proof.begins)


class _Supervised(L.LightningModule):
    """A LightningModule of any module with a loss and an optimizer."""

    def __init__(self, net: nn.Module, loss: Loss, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer

    def training_step(self, batch: object, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.make_optimizer, self)


def as_lightning_module(
    module: nn.Module | Callable[[], nn.Module], loss: Loss | None, optimizer: Callable[[Any], Optimizer] | None
) -> L.LightningModule:
    """Return the module itself if it can train, or a wrapper with the loss and the optimizer.

    Raises:
        TypeError: not a module, or a module without loss or optimizer.
    """
    built = module() if callable(module) and not isinstance(module, nn.Module) else module
    if not isinstance(built, nn.Module):
        way_out = "Pass an nn.Module, or a function without arguments that returns one"
        raise TypeError(explain(f"module={module!r}", f"expected an nn.Module, got {type(built).__name__}", way_out))
    if isinstance(built, L.LightningModule) and loss is None and optimizer is None:
        return built
    if loss is None or optimizer is None:
        missing = "loss" if loss is None else "optimizer"
        why = "a step needs both, and only a LightningModule has its own"
        way_out = f"Pass {missing}= too: loss is a function of (module, batch), optimizer a function of the parameters"
        raise TypeError(explain(f"{type(built).__name__} without {missing}=", why, way_out))
    return _Supervised(built, loss, optimizer)


def _list_techniques(module: L.LightningModule, techniques: Sequence[Technique] | None) -> list[Technique]:
    if techniques is None:
        brought = list_callbacks(module.configure_callbacks)
        techniques = [callback for callback in brought if isinstance(callback, Technique)]
    if not techniques:
        why = "expected at least one technique to compare with the plain step"
        raise ValueError(explain("techniques=[]", why, "Pass some, for example [ft.MicroBatching(4)]"))
    return check_together(techniques)


def _name_of(module: L.LightningModule) -> str:
    return type(module.net).__name__ if isinstance(module, _Supervised) else type(module).__name__


def _drop_repeats(sentences: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))
