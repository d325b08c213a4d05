"""Run one step on a few samples, unsplit and in micro-batches, without side effects, and compare the gradients."""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.module import register_module_forward_pre_hook
from torchmetrics import Metric

from lightning_fasttrain.core.device import is_out_of_memory, return_unused_memory
from lightning_fasttrain.core.distributed import from_all_ranks, is_sharded
from lightning_fasttrain.core.host.lightning import in_fabric_backward
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, patch, without_rounding, wrappers_in
from lightning_fasttrain.core.state.step_state import (
    StepState,
    copy_value,
    same_changes,
    same_values,
    without_compiling,
)
from lightning_fasttrain.trial.deterministic_step import (
    DeterministicStep,
    Rows,
    autocast_device,
    list_batch_statistics,
)
from lightning_fasttrain.trial.read_normalizers import read_normalizers, walk_graph
from lightning_fasttrain.trial.runs import (
    FLOAT64,
    LOW,
    NO_GRADIENT,
    NOT_FINITE,
    LoggedValue,
    Run,
    Trial,
    as_numbers,
    entries_of,
    loss_of,
    own_divisor,
    relative_difference,
)
from lightning_fasttrain.trial.sample_rows import Sample

# Rounding is nearly always below the one, also in float32, and a real difference that it hides below the other.
_SURE = 1e-5
_UNSURE = 0.3
_LOGGED = 1e-4  # for the states of metrics
_MOST_OF_METRIC = 10**6  # elements of a state that is compared, unlike the predictions of a whole epoch


Changes = Mapping[str, tuple[Any, Any]]  # name → the value before a run, and after it


@dataclass(frozen=True)
class TrialStep:
    """A step and the environment it runs in.

    Attributes:
        step: maps a micro-batch to an output in which :func:`loss_of` finds a loss.
        models: the models that it changes, as far as known.
        context: entered around every run, for instance to disable gradient synchronization.
        gradients: whether gradients can be computed; otherwise only losses are compared.
        may_skip: whether the step may return None to skip a batch.
        in_turn: whether micro-batches of a batch run one after another, each on the state that the one before has left,
            so that the trial shows what of it differs from the unsplit step's.
        may_scale: whether gradients can be scaled before they are used, so that the total need not be known beforehand.
    """

    step: Callable[[Any], Any]
    models: Sequence[nn.Module] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    gradients: bool = True
    may_skip: bool = False
    in_turn: bool = True
    may_scale: bool = True


def try_split(trial_step: TrialStep, samples: Iterator[Sample], precision: str = "float32") -> Trial:
    """Run the step on a few samples, unsplit and in micro-batches, as far as memory and the step allow."""
    trial: Trial | None = None
    for sample in samples:
        trial = _try_sample(trial_step, sample, precision)
        # Ranks with sharded parameters must run the same number of forwards.
        if not trial.why_not or trial.is_skipped or not trial_step.gradients:
            break
    assert trial is not None
    return trial


def distinguish_rounding(trial_step: TrialStep, trial: Trial, error_of: Callable[[Trial], float]) -> Trial:
    """Return a trial in float64 where the error of the given one may be rounding; otherwise the given one.

    Without it, 5% of a gradient pass as rounding under autocast and in bfloat16:
    ``test_a_weak_influence_of_other_samples_is_distinguished_from_rounding``.

    Args:
        trial_step: where the step runs.
        trial: a trial of the step.
        error_of: returns the relative error of what is tried.
    """
    # Ranks with sharded parameters must run the same number of forwards.
    if not trial_step.gradients or trial.limit <= FLOAT64 or not _SURE < error_of(trial) <= _UNSURE:
        return trial
    # bitsandbytes' layers have no kernels for float64, and on a CPU return memory that nothing was written to.
    if any(next(quantized_tensors(model), None) is not None for model in trial_step.models):
        return trial
    precise = try_split(replace(trial_step, in_turn=False), iter([trial.sample]), "float64")
    if precise.precision != "float64" or precise.why_not:
        return trial
    # It must change rounding alone, which not every kernel supports.
    one, other = trial.whole.values, precise.whole.values
    if one.shape == other.shape and relative_difference(one, other) <= 0.1:
        known = ("scratch", "filled", "state", "metrics")
        return replace(precise, **{name: getattr(trial, name) for name in known})
    return trial


def try_unsplit(trial_step: TrialStep, sample: Sample, precision: str = "float32") -> Trial:
    """Run the step on an unsplit sample. Raises: whatever the step raises, or that it returns no loss."""
    try:
        return _try(trial_step, replace(sample, cuttings=[]), precision)
    except _NoLossError as error:
        raise error.reason from None
    except Exception as error:
        error.add_note("The step raised this on unsplit samples, in a trial before the step that counts.")
        raise


def try_whole(trial_step: TrialStep, batch: object, size: int = 1) -> Trial:
    """Run the step on a whole batch, without gradients. Raises: what the step raises."""
    with torch.no_grad():
        return try_unsplit(replace(trial_step, gradients=False), Sample(batch, size, []))


def _try_sample(trial_step: TrialStep, sample: Sample, precision: str) -> Trial:
    """Run in the given precision; if the step fails in it or runs out of memory, in the step's own precision."""
    precisions = [precision, "as it is"]
    expected: tuple[type[Exception], ...] = (Exception,)  # where the step fails on the whole batch, its error is shown
    if not trial_step.gradients:  # three runs, and a rank that fails must not leave the others waiting in a further one
        sample, precisions, expected = replace(sample, cuttings=sample.cuttings[:1]), ["as it is"], ()
    failure, failed = "", False
    for tried in dict.fromkeys(precisions):
        try:
            return _try(trial_step, sample, tried)
        except _NoLossError as error:
            if error.output is not None or not trial_step.may_skip:
                raise error.reason from None
            return Trial(sample, why_not="the step returned None", is_skipped=True)
        except expected as error:
            failed = not is_out_of_memory(error)
            failure = f"the step failed on {sample.size} samples alone: {type(error).__name__} {error}"
        return_unused_memory()
    return Trial(sample, why_not=failure, failed=failed)


def _try(trial_step: TrialStep, sample: Sample, precision: str, moved: Sequence[str] = ()) -> Trial:
    mode = DeterministicStep(precision)
    sees_writes = trial_step.gradients and trial_step.in_turn and not moved
    with _undone(trial_step, precision, moved) as state:
        if not sees_writes:
            state.copy_if_small()
        if trial_step.gradients and _is_undecided(trial_step):  # runs before and after are not comparable
            _run_once(trial_step, mode, sample.whole, None, sample.size)
            state.restore()
        whole = _run_once(trial_step, mode, sample.whole, None, sample.size)
        whole.left = _read_state(trial_step, state)
        whole.metrics = _read_metrics(trial_step.models)
        # A teacher that still equals its student: nothing that a step does to it would be seen.
        unmoved = state.list_unchanged_writes() if sees_writes else []
        state.copy_if_small()
        trial = None if unmoved else _try_micro_batches(trial_step, mode, state, sample, whole)
    if trial is None:
        return _try(trial_step, sample, precision, unmoved)
    trial = replace(trial, precision=precision, moved=moved)
    if mode.statistics:
        for model in trial_step.models:
            trial.statistics = [*trial.statistics, *map(repr, list_batch_statistics(model))]
    trial.rounding = mode.autocast or mode.rounds or _uses_tf32(trial.parameters)
    trial.in_float32 = mode.in_float32
    trial.why_not = _why_not(mode, trial, trial_step)
    return trial


def _is_undecided(trial_step: TrialStep) -> bool:
    """Whether a technique decides by the next run what it does in later ones, as where a head is not named."""
    wrappers = itertools.chain.from_iterable(wrappers_in(model, WrappedForward) for model in trial_step.models)
    return any(wrapper.is_undecided for wrapper in wrappers)


def _try_micro_batches(
    trial_step: TrialStep, mode: DeterministicStep, state: StepState, sample: Sample, whole: Run
) -> Trial:
    """Run the micro-batches of a sample, after the unsplit run, whose changes are not undone yet."""
    splits: list[list[Run]] = []
    left_otherwise: dict[str, None] = {}
    other_metrics: set[str] = set()
    for cutting in sample.cuttings:
        state.restore()
        splits.append([])
        for micro_batch, rows in cutting:
            if trial_step.in_turn:
                state.restore_generators()
            else:
                state.restore()
            splits[-1].append(_run_once(trial_step, mode, micro_batch, rows, sample.size))
        if trial_step.in_turn:
            left_otherwise |= dict.fromkeys(list_other_state(whole.left, _read_state(trial_step, state)))
            metrics = _read_metrics(trial_step.models)
            other_metrics |= {name for name in metrics if not same_values(metrics[name], whole.metrics[name], _LOGGED)}
    trial = Trial(sample, whole, splits, metrics=sorted(other_metrics))
    if left_otherwise:
        trial = _judge_state(trial_step, mode, state, trial, list(left_otherwise))
    if splits:
        # A step may create leaves of its own, such as inputs of a gradient penalty, which differ between runs.
        others = set(itertools.chain.from_iterable(run.entries for run in trial.runs[1:]))
        shared = [leaf for leaf in whole.entries if leaf in others or isinstance(leaf, nn.Parameter)]
        for run in trial.runs:
            run.keep(shared)
    return trial


def _judge_state(
    trial_step: TrialStep, mode: DeterministicStep, state: StepState, trial: Trial, names: list[str]
) -> Trial:
    """Return the trial with what is known of the state under these names, which micro-batches leave otherwise.

    It is scratch if every step writes it anew: after a second unsplit step it is the same, and what the first one left
    has no influence on the loss. A list that is filled and has none is reported only.
    """
    whole, sample = trial.whole, trial.sample
    scratch: set[str] = set()
    settles = not trial_step.gradients  # ranks with sharded parameters must run the same number of forwards
    if trial_step.gradients:
        state.restore()
        state.restore_generators()
        _run_once(trial_step, mode, sample.whole, None, sample.size)
        state.restore_generators()
        again = _run_once(trial_step, mode, sample.whole, None, sample.size)
        settles = again.entries.keys() == whole.entries.keys()
        settles = settles and relative_difference(whole.values, again.values) <= _SURE
        if settles:
            scratch = whole.left.keys() - list_other_state(whole.left, _read_state(trial_step, state))
    lasting = [name for name in names if name not in scratch]
    filled = [name for name in lasting if settles and _is_list(whole.left.get(name))]
    return replace(trial, scratch=scratch, filled=filled, state=[name for name in lasting if name not in filled])


def list_other_state(one: Changes, other: Changes) -> list[str]:
    """Return the names of what two runs left differently; rounding does not count."""
    different: list[str] = []
    for name in dict.fromkeys((*one, *other)):
        before = (one.get(name) or other[name])[0]
        unchanged = before, before
        if not same_changes(one.get(name, unchanged), other.get(name, unchanged)):
            different.append(name)
    return different


def _is_list(change: tuple[Any, Any] | None) -> bool:
    return change is not None and isinstance(change[1], list)


def _read_state(trial_step: TrialStep, state: StepState) -> Changes:
    """Return what differs from ``state``, without metrics, whose values are weighted like logged ones."""
    found = state.differences()
    metrics = _name_metrics(trial_step.models)
    return {name: value for name, value in found.items() if not name.startswith(metrics)}


def _read_metrics(models: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Return name → the states of each metric; lists of tensors, such as predictions, are joined."""
    found: dict[str, list[Any]] = {}
    for model in models:
        for name, metric in model.named_modules():
            if isinstance(metric, Metric):
                states = map(_join, metric.metric_state.values())
                found[name] = [copy_value(state) for state in states if state.numel() <= _MOST_OF_METRIC]
    return found


def _join(state: Tensor | list[Tensor]) -> Tensor:
    if isinstance(state, Tensor):
        return state
    return torch.cat(list(map(torch.atleast_1d, state))) if state else torch.empty(0)


def _name_metrics(models: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the prefixes of the names of metrics, whose values are weighted like logged ones."""
    found: list[str] = []
    for place, model in enumerate(models):
        prefix = f"{type(model).__name__}{place}." if len(models) > 1 else ""
        found += [f"{prefix}{name}." for name, module in model.named_modules() if isinstance(module, Metric)]
    return tuple(found)


@contextmanager
def _undone(trial_step: TrialStep, precision: str, moved: Sequence[str] = ()) -> Iterator[StepState]:
    """Undo what runs of the step change, at the end; yields the state from before.

    In float64 the parameters are, too, so that their gradients are not rounded to the parameters' own dtype.

    Args:
        trial_step: where the step runs.
        precision: the precision in which it runs.
        moved: names of tensors that differ a little from what they are.
    """
    cast: list[nn.Parameter] = []
    if precision == "float64":
        held = dict.fromkeys(itertools.chain.from_iterable(map(nn.Module.parameters, trial_step.models)))
        cast = [parameter for parameter in held if parameter.dtype in (torch.float32, *LOW)]
    with ExitStack() as undo:
        for parameter in cast:
            undo.callback(setattr, parameter, "data", parameter.data)
            parameter.data = parameter.data.double()
        if moved:
            unmoved = StepState(trial_step.models)
            undo.callback(unmoved.restore)
            unmoved.move_(moved)
        state = StepState(trial_step.models, parameters=not _moves_parameters(trial_step))
        undo.callback(state.restore)
        # Micro-batches too: a codebook may renew more of its unused codes where there are fewer samples.
        undo.enter_context(nullcontext() if _moves_parameters(trial_step) else state.watch())
        undo.enter_context(_restoring_others(state))
        yield state


@contextmanager
def _restoring_others(state: StepState) -> Iterator[None]:
    """Restore the buffers of modules that run in the context but are not part of ``state``: a step may hide them.

    Not their attributes, which a step may already have changed for the time of this call, as Fabric's wrapper does.
    """
    copies: dict[Tensor, Tensor] = {}
    seen: set[nn.Module] = set()

    def hold(module: nn.Module, _: object) -> None:
        if not state.holds(module) and module not in seen:
            seen.add(module)
            with torch._C.DisableTorchFunction():  # the trial may compute in another precision
                copies.update((buffer, buffer.detach().clone()) for buffer in module.buffers(recurse=False))

    handle = register_module_forward_pre_hook(hold)
    try:
        yield
    finally:
        handle.remove()
        for buffer, before in copies.items():
            buffer.detach().copy_(before)


def _moves_parameters(trial_step: TrialStep) -> bool:
    """Whether parameters are replaced in a forward, as by strategies that shard them."""
    return any(map(is_sharded, trial_step.models))


def _why_not(mode: DeterministicStep, trial: Trial, trial_step: TrialStep) -> str:
    """Return why the runs of a trial cannot be compared; empty if they can."""
    whole, *others = trial.runs
    if not others:
        return "the batch is one sample, which cannot be compared with another"
    if mode.redrawn:
        return "the step draws random numbers in recomputed blocks"
    if any(run.drawn != whole.drawn for run in others):
        return "the step draws random numbers with Python or NumPy, more of them for more samples"
    if not whole.is_finite:
        return NOT_FINITE
    if trial_step.gradients and not whole.values[1:].any():
        return NO_GRADIENT
    return ""


def run_again(trial_step: TrialStep, trial: Trial, micro_batch: int | None = None) -> Run:
    """Run the step once more, on the unsplit sample of a trial or on one of its first micro-batches."""
    sample = trial.sample
    batch, rows = (sample.whole, None) if micro_batch is None else sample.cuttings[0][micro_batch]
    with _undone(trial_step, trial.precision, trial.moved) as state:
        state.copy_if_small()
        run = _run_once(trial_step, DeterministicStep(trial.precision), batch, rows, sample.size)
        run.left = _read_state(trial_step, state)
        return run


@contextmanager
def watching_calls(modules: Iterable[nn.Module], note: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call ``note`` with each of these modules that returns in the context, its arguments and its output."""

    def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        note(module, (args, kwargs), output)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _run_once(trial_step: TrialStep, mode: DeterministicStep, batch: object, rows: Rows | None, samples: int) -> Run:
    """Run the step on a batch, which holds these rows of the samples; all of them if None."""
    mode.begin(rows, samples)
    with without_compiling(), _collecting_logs(trial_step.models) as logged, trial_step.context():
        with nullcontext() if mode.precision == "as it is" else _without_autocast():
            with without_rounding(trial_step.models), mode:
                output = trial_step.step(batch)
                loss = _loss(output)
                if type(output) is dict:
                    for key, value in output.items():
                        note_value(logged, f"return {key}", value)
                leaves = _leaves_of(loss) if trial_step.gradients else []
                read = read_normalizers(loss)
                terms = tuple(map(as_numbers, read.terms))
                gradients = _gradients(loss, leaves)
    entries = {leaf: entries_of(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True)}
    value = float(loss.detach())
    return Run(batch, value, entries, terms, read.structure, logged, drawn=_read_randomness())


def _read_randomness() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]


class _NoLossError(Exception):
    """A step's output without a valid loss: an error of the step, not of the few samples."""

    def __init__(self, output: object, reason: Exception) -> None:
        self.output, self.reason = output, reason


def _loss(output: object) -> Tensor:
    try:
        return loss_of(output)
    except (TypeError, ValueError) as error:
        raise _NoLossError(output, error) from error


def _without_autocast() -> AbstractContextManager[Any]:
    device = autocast_device()
    if device is None:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _gradients(loss: Tensor, parameters: list[Tensor]) -> Sequence[Tensor | None]:
    """Compute ``torch.autograd.grad`` so that recomputed forwards run under the mode, without dropout.

    The mode would treat ``torch.autograd.grad`` as one function and be off inside it."""
    if not parameters:
        return ()
    with _without_autocast(), in_fabric_backward():  # as in a regular backward
        # The order is: outputs, their gradients, retain_graph, create_graph, inputs, allow_unused.
        return _engine_run_backward(
            (loss,), (torch.ones_like(loss),), False, False, tuple(parameters), True, accumulate_grad=False
        )


@contextmanager
def _collecting_logs(models: Sequence[nn.Module]) -> Iterator[dict[str, LoggedValue]]:
    """Collect logged values instead of logging them, for comparison with those of the micro-batches."""
    logged: dict[str, LoggedValue] = {}

    def collect(name: str, value: object, *args: object, **kwargs: object) -> None:
        note_value(logged, name, value)

    with ExitStack() as stack:
        for model in models:
            if isinstance(model, L.LightningModule):
                stack.callback(patch(model, "log", collect))
        yield logged


def note_value(logged: dict[str, LoggedValue], name: str, value: object) -> None:
    """Record a scalar value; a Metric, which accumulates by itself, is skipped."""
    if isinstance(value, Tensor) and value.numel() == 1:
        divisor = own_divisor(value)
        logged[name] = LoggedValue(float(value.detach()), None if divisor is None else float(divisor))
    elif isinstance(value, float | int):
        logged[name] = LoggedValue(float(value), None)


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors that ``loss`` has a gradient for, in the order of its graph."""
    if loss.grad_fn is None:
        return []
    found: dict[int, Tensor] = {}
    for node in walk_graph(loss.grad_fn):
        # Only nodes that accumulate a leaf's gradient have it.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
    return list(found.values())


def _uses_tf32(parameters: list[Tensor]) -> bool:
    if not any(p.is_cuda for p in parameters):
        return False
    # torch's defaults: TF32 in convolutions, but not in matrix products.
    products, convolutions = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    return products == "tf32" or convolutions != "ieee"


class TrialSchedule:
    """Decides which batches are examined again: 2, 4, 8, ... while that takes under 1% of the time so far.

    Args:
        from_first: whether the first batch is one of them.

    Attributes:
        seconds: time spent on examining batches.

    Example:
        >>> schedule = TrialSchedule()
        >>> [schedule.is_due(lambda: True) for _ in range(8)]
        [False, True, False, True, False, False, False, True]
    """

    def __init__(self, *, from_first: bool = False) -> None:
        self.seconds = 0.0
        self._batches = 0
        self._first = 1 if from_first else 2
        self._began = time.monotonic()

    def is_due(self, is_wanted: Callable[[], bool]) -> bool:
        """Count a batch, and return whether it is examined again.

        Args:
            is_wanted: whether examining could show anything. All ranks are asked, and all must want it.
        """
        self._batches += 1
        if self._batches < self._first or self._batches & (self._batches - 1):
            return False
        is_cheap = self.seconds < 0.01 * (time.monotonic() - self._began)
        answers = from_all_ranks([(is_wanted(), is_cheap)])
        return all(each for each, _ in answers) and answers[0][1]  # decided by the first rank, as clocks differ

    @property
    def has_begun(self) -> bool:
        """Whether a batch has been counted."""
        return self._batches > 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the time spent on examining a batch in the context."""
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began
