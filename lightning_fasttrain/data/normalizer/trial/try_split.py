"""Run one step on a few samples, unsplit and in micro-batches, without side effects, and compare the gradients."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from lightning_fasttrain.core.modules.wrapped_forward import patch, without_rounding
from lightning_fasttrain.core.state.restore import remember
from lightning_fasttrain.data.normalizer.log_rules import LoggedValue, own_divisor
from lightning_fasttrain.data.normalizer.read_normalizers import read_normalizers
from lightning_fasttrain.data.normalizer.trial.deterministic_step import DeterministicStep, Rows, autocast_device
from lightning_fasttrain.data.normalizer.trial.runs import LOW, Run, Split, as_numbers, entries_of
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.step_function import loss_of

_NOT_FINITE = "the loss or its gradient is not finite"
_NO_GRADIENT = "the gradient is zero everywhere"


@dataclass(frozen=True)
class Stage:
    """A step and the environment it runs in.

    Attributes:
        step: maps a micro-batch to an output in which :func:`loss_of` finds a loss.
        models: the models that it changes, as far as known.
        context: entered around every run, for instance to disable gradient synchronization.
        gradients: whether gradients can be computed; otherwise only losses are compared.
        may_skip: whether the step may return None to skip a batch.
        may_scale: whether gradients can be scaled before they are used, so that the total need not be known beforehand.
    """

    step: Callable[[Any], Any]
    models: Sequence[nn.Module] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    gradients: bool = True
    may_skip: bool = False
    may_scale: bool = True


@dataclass
class Trial:
    """The outcome of trying a step.

    Attributes:
        sample: the samples on which it was tried.
        splits: empty where there was nothing to compare.
        rounding: whether low precision hides small differences.
        precision: the precision in which it ran, as of a :class:`DeterministicStep`.
        statistics: whether BatchNorm used statistics of the batch.
        whole: the run on the unsplit sample.
        why_not: why there is nothing to compare; empty if there is.
        is_skipped: whether the step returned None, so that nothing is known yet.
        failed: whether the step raised an error other than out of memory on a few samples.
    """

    sample: Sample
    splits: list[Split] = field(default_factory=list)
    rounding: bool = True
    precision: str = "as it is"
    statistics: bool = False
    whole: Run | None = None
    why_not: str = ""
    is_skipped: bool = False
    failed: bool = False

    @property
    def shows_nothing(self) -> bool:
        """Whether the samples have no finite loss or no gradient, as without targets."""
        return self.why_not in (_NOT_FINITE, _NO_GRADIENT)

    @property
    def precise(self) -> bool:
        """Whether all operations ran in float64."""
        return self.precision == "float64"


def try_split(stage: Stage, samples: Iterator[Sample], precision: str = "float32") -> Trial:
    """Run the step on a few samples, unsplit and in micro-batches, as far as memory and the step allow."""
    trial: Trial | None = None
    if not stage.gradients:
        return _try_in_step(stage, next(samples))
    for sample in samples:
        trial = _try_either_way(stage, sample, precision)
        if not trial.why_not or trial.is_skipped:
            return trial
    assert trial is not None
    return trial


def try_unsplit(stage: Stage, sample: Sample) -> Trial:
    """Run the step on an unsplit sample. Raises: whatever the step raises, or that it returns no loss."""
    try:
        return _try(stage, sample, "float32")
    except _NoLossError as error:
        raise error.reason from None


def _try_in_step(stage: Stage, sample: Sample) -> Trial:
    """Run the step three times: ranks with sharded parameters must run the same number of forwards."""
    try:
        return _try(stage, Sample(sample.whole, sample.size, sample.cuttings[:1]), "as it is")
    except _NoLossError as error:
        return _skip_or_refuse(stage, sample, error)


def _try_either_way(stage: Stage, sample: Sample, precision: str) -> Trial:
    """Run in the given precision; if the step fails in it or runs out of memory, in the step's own precision."""
    failure, failed = "", False
    for tried in dict.fromkeys((precision, "as it is")):
        try:
            return _try(stage, sample, tried)
        except _NoLossError as error:
            return _skip_or_refuse(stage, sample, error)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # errors that a user's step may raise
            failed = not isinstance(error, torch.OutOfMemoryError)
            failure = f"the step failed on {sample.size} samples alone: {type(error).__name__} {error}"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return Trial(sample, why_not=failure, failed=failed)


def _skip_or_refuse(stage: Stage, sample: Sample, error: "_NoLossError") -> Trial:
    """Accept that a step which may skip batches has skipped this one; any other must return a loss."""
    if error.output is not None or not stage.may_skip:
        raise error.reason from None
    return Trial(sample, why_not="the step returned None", is_skipped=True)


def _try(stage: Stage, sample: Sample, precision: str) -> Trial:
    mode = DeterministicStep(precision)
    with _undone(stage, precision) as restore:
        whole, parameters, splits = _run_cuttings(stage, mode, sample, restore)
    rounding = mode.autocast or mode.rounds or _uses_tf32(parameters)
    return Trial(sample, splits, rounding, precision, mode.statistics, whole, _why_not(mode, splits, stage))


def _run_cuttings(
    stage: Stage, mode: DeterministicStep, sample: Sample, restore: Callable[[], None]
) -> tuple[Run, list[Tensor], list[Split]]:
    """Return the run on the sample, the parameters of its loss, and the runs on all micro-batches."""
    whole = _run_once(stage, mode, sample.whole, None, sample.size)
    runs: list[list[Run]] = []
    for cutting in sample.cuttings:
        runs.append([])
        for micro_batch, rows in cutting:
            restore()
            runs[-1].append(_run_once(stage, mode, micro_batch, rows, sample.size))
    # A step may create leaves of its own, such as inputs of a gradient penalty, which differ between runs.
    others = {leaf for micro_batches in runs for run in micro_batches for leaf in run.entries}
    parameters = [leaf for leaf in whole.entries if leaf in others or isinstance(leaf, nn.Parameter)]
    for run in [whole, *itertools.chain.from_iterable(runs)]:
        run.take(parameters)
    splits: list[Split] = []
    for cutting, micro_batches in zip(sample.cuttings, runs, strict=True):
        splits.append(Split([micro_batch for micro_batch, _ in cutting], whole, micro_batches, parameters))
    return whole, parameters, splits


@contextmanager
def _undone(stage: Stage, precision: str) -> Iterator[Callable[[], None]]:
    """Undo what runs of the step change; the yielded function does so between two runs.

    In float64 the parameters are, too, so that their gradients are not rounded to the parameters' own dtype.
    """
    restore = remember(stage.models)
    held = {id(parameter): parameter for model in stage.models for parameter in model.parameters()}
    cast: list[nn.Parameter] = []
    if precision == "float64":
        cast = [parameter for parameter in held.values() if parameter.dtype in (torch.float32, *LOW)]
    before = [parameter.data for parameter in cast]
    try:
        for parameter in cast:
            parameter.data = parameter.data.double()
        yield restore
    finally:
        for parameter, data in zip(cast, before, strict=True):
            parameter.data = data
        restore()


def _why_not(mode: DeterministicStep, splits: list[Split], stage: Stage) -> str:
    if not splits:
        return "the batch is one sample, which cannot be compared with another"
    if mode.redrawn:
        return "the step draws random numbers in recomputed blocks"
    if any(run.drawn != split.whole.drawn for split in splits for run in split.runs):
        return "the step draws random numbers with Python or NumPy, more of them for more samples"
    if not splits[0].whole.is_finite:
        return _NOT_FINITE
    if stage.gradients and not splits[0].norm:
        return _NO_GRADIENT
    return ""


def run_again(stage: Stage, trial: Trial, micro_batch: int | None = None) -> Run:
    """Run the step once more, on the unsplit sample of a trial or on one of its first micro-batches."""
    mode = DeterministicStep(trial.precision)
    sample = trial.sample
    rows, where = (sample.whole, None) if micro_batch is None else sample.cuttings[0][micro_batch]
    with _undone(stage, trial.precision):
        return _run_once(stage, mode, rows, where, sample.size)


def _run_once(stage: Stage, mode: DeterministicStep, rows: Any, where: Rows | None, samples: int) -> Run:
    """Run the step once."""
    mode.begin(where, samples)
    low = mode.precision != "as it is"
    before = {name: (id(buffer), buffer._version) for name, buffer in _buffers(stage.models)}
    with _without_compiling(), _collecting_logs(stage.models) as logged, stage.context():
        with _without_autocast() if low else nullcontext():
            with without_rounding(stage.models), mode:
                output = stage.step(rows)
                loss = _loss(output)
                for key, value in output.items() if type(output) is dict else ():
                    note_value(logged, f"return {key}", value)
                leaves = _leaves_of(loss) if stage.gradients else []
                read = read_normalizers(loss)
                terms = tuple(as_numbers(term) for term in read.terms)
                gradients = _gradients(loss, leaves)
    entries = {leaf: entries_of(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True)}
    changed = [name for name, buffer in _buffers(stage.models) if before.get(name) != (id(buffer), buffer._version)]
    return Run(
        float(loss.detach()),
        torch.zeros(0).double(),
        entries,
        terms,
        read.structure,
        logged,
        tuple(changed),
        _read_randomness(),
    )


def _buffers(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for model in models:
        yield from model.named_buffers()


def _read_randomness() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]


class _NoLossError(Exception):
    """A step's output without a valid loss: an error of the step, not of the few samples."""

    def __init__(self, output: Any, reason: Exception) -> None:
        self.output, self.reason = output, reason


def _loss(output: Any) -> Tensor:
    try:
        return loss_of(output)
    except (TypeError, ValueError) as error:
        raise _NoLossError(output, error) from error


def _without_compiling() -> AbstractContextManager[Any]:
    """Disable compilation: compiled code would be recompiled for these shapes, and modes cannot see into it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled without it, and importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _without_autocast() -> AbstractContextManager[Any]:
    device = autocast_device()
    return torch.autocast(device, enabled=False) if device else nullcontext()


def _gradients(loss: Tensor, parameters: list[Tensor]) -> Sequence[Tensor | None]:
    """Compute ``torch.autograd.grad`` so that recomputed forwards run under the mode, without dropout.

    The mode would treat ``torch.autograd.grad`` as one function and be off inside it."""
    if not parameters:
        return ()
    with _without_autocast():  # as in a regular backward
        # The order is: outputs, their gradients, retain_graph, create_graph, inputs, allow_unused.
        return _engine_run_backward(
            (loss,), (torch.ones_like(loss),), False, False, tuple(parameters), True, accumulate_grad=False
        )


@contextmanager
def _collecting_logs(models: Sequence[nn.Module]) -> Iterator[dict[str, LoggedValue]]:
    """Collect logged values instead of logging them, for comparison with those of the micro-batches."""
    logged: dict[str, LoggedValue] = {}

    def collect(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        note_value(logged, name, value)

    with ExitStack() as stack:
        for model in models:
            if isinstance(model, L.LightningModule):
                stack.callback(patch(model, "log", collect))
        yield logged


def note_value(logged: dict[str, LoggedValue], name: str, value: Any) -> None:
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
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        # Only nodes that accumulate a leaf's gradient have it.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def _uses_tf32(parameters: list[Tensor]) -> bool:
    if not any(p.is_cuda for p in parameters):
        return False
    # torch's defaults: TF32 in convolutions, but not in matrix products.
    products, convolutions = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    return products == "tf32" or convolutions != "ieee"
