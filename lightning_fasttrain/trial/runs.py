"""The loss and gradients of a step on a few samples and on micro-batches, and the error of a weighted sum."""

import functools
import itertools
import math
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch import loss_in
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.trial.read_normalizers import (
    Kind,
    Number,
    Slot,
    Term,
    count_summed,
    is_of_parameters,
    read_normalizers,
    signed,
)
from lightning_fasttrain.trial.sample_rows import Sample

_ENTRIES = 4096  # per parameter's gradient; equal sums are equal in every entry, so a sample of them suffices
LOW = (torch.bfloat16, torch.float16)
# Summed over thousands of tokens in 16 bits, the gradient of a bias is off by a fifth or more, unsplit or not, so that
# only large gradients are conclusive there.
_LOW_FLOOR = 3.0
_FLOAT32 = 1e-3
LOW_PRECISION = 5e-2  # for low-precision operations that float64 cannot replace
FLOAT64 = 1e-6  # a step may itself round some tensors to float32
_ALL_FLOAT64 = 1e-9
NOT_FINITE = "the loss or its gradient is not finite"
NO_GRADIENT = "the gradient is zero everywhere"


@dataclass(frozen=True)
class ReadTerm:
    """A term of a loss in Python numbers: :class:`~.read_normalizers.Term` without the graph."""

    kind: Kind
    name: str
    slots: tuple[Slot, ...]
    summed: float | None
    of_parameters: bool
    ignored: int | None = None


def as_numbers(term: Term) -> ReadTerm:
    """Return a term without its graph; this waits for the device."""
    slots = tuple(Slot(float(slot.value), slot.divides) for slot in term.slots)
    summed = None
    if term.kind in ("sum", "quotient"):
        summed = count_summed(term.node)
    if summed is not None:
        summed = float(summed)
    ignored = getattr(term.node, "_saved_ignore_index", None)
    if ignored is not None:
        ignored = signed(ignored)
    return ReadTerm(term.kind, term.name, slots, summed, is_of_parameters(term.node), ignored)


@dataclass(frozen=True)
class LoggedValue:
    """A scalar that a step logged.

    Attributes:
        value: the value.
        divisor: the divisor shown by its graph; None where it has no graph, or is not a mean.
    """

    value: float
    divisor: float | None


def own_divisor(value: Tensor) -> Number | None:
    """Return the divisor that the graph of a logged value shows.

    Example:
        >>> own_divisor(torch.ones(3, 2, requires_grad=True).mean())
        6
    """
    terms = read_normalizers(value).terms
    if not terms or any(term.kind not in ("mean", "quotient") for term in terms):
        return None
    # The terms of a loss share one normalizer, except for constant factors, which cancel.
    return terms[0].normalizer


@dataclass
class Run:
    """The result of one run of a step.

    Attributes:
        batch: the samples.
        loss: the value of the loss.
        entries: for each leaf of its graph, some entries of the gradient, in float64 on the CPU.
        terms: the terms of its loss.
        structure: the operations of its loss on scalars.
        logged: the scalars that it logged.
        left: name → value before and after of what it changed besides metrics: buffers, attributes, parameters
            that it wrote itself. Read only after unsplit runs.
        metrics: name → states of each metric afterwards.
        drawn: the states of Python's and NumPy's generators at its end.
    """

    batch: Any
    loss: float
    entries: dict[Tensor, Tensor] = field(default_factory=dict)
    terms: tuple[ReadTerm, ...] = ()
    structure: tuple[str, ...] = ()
    logged: dict[str, LoggedValue] = field(default_factory=dict)
    left: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    metrics: Mapping[str, list[Any]] = field(default_factory=dict)
    drawn: tuple[Any, ...] = ()

    def keep(self, leaves: Sequence[Tensor]) -> None:
        """Keep the gradients of these leaves alone; zeros where the loss does not depend on one."""
        kept: dict[Tensor, Tensor] = {}
        for leaf in leaves:
            kept[leaf] = self.entries[leaf] if leaf in self.entries else entries_of(leaf, None)
        self.entries = kept
        vars(self).pop("values", None)

    @cached_property
    def values(self) -> Tensor:
        """The loss, followed by the entries of the gradient."""
        return torch.cat([torch.tensor([self.loss], dtype=torch.float64), *self.entries.values()])

    @property
    def counts_nothing(self) -> bool:
        """Whether the loss and its gradient are zero, or it is a leaf that the step made, as often without targets."""
        is_leaf = all(term.kind == "parameter" and not term.of_parameters for term in self.terms)
        return self.loss == 0 and (is_leaf or not self.values.any())

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.values).all())


@dataclass
class Trial:
    """The outcome of trying a step.

    Attributes:
        sample: the samples on which it was tried.
        whole: the run on the unsplit sample; one without terms where the step did not run.
        splits: the runs of the micro-batches, for each way of splitting; empty where there was nothing to compare.
        rounding: whether low precision hides small differences.
        in_float32: whether anything was computed in float32, as the loss of a model in float64 may be.
        precision: the precision in which it ran, as of a :class:`DeterministicStep`.
        statistics: names of the BatchNorm layers that used statistics of the batch.
        state: names of what micro-batches leave otherwise than the unsplit step, and a later step may depend on.
        filled: names of lists that get an entry for each micro-batch, and on which the loss does not depend.
        metrics: names of metrics with another state after micro-batches, such as a mean over batches.
        scratch: names of what every step writes before it reads it.
        moved: names of tensors that were changed a little beforehand, since the step wrote them without a change.
        why_not: why there is nothing to compare; empty if there is.
        is_skipped: whether the step returned None, so that nothing is known yet.
        failed: whether the step raised an error other than out of memory on a few samples.
    """

    sample: Sample
    whole: Run = field(default_factory=lambda: Run(None, math.nan))
    splits: list[list[Run]] = field(default_factory=list)
    rounding: bool = True
    in_float32: bool = True
    precision: str = "as it is"
    statistics: Sequence[str] = ()
    state: Sequence[str] = ()
    filled: Sequence[str] = ()
    metrics: Sequence[str] = ()
    scratch: Collection[str] = ()
    moved: Sequence[str] = ()
    why_not: str = ""
    is_skipped: bool = False
    failed: bool = False

    def without_runs(self) -> "Trial":
        """Return the trial without its samples and runs, as it can be sent to other ranks."""
        return replace(self, sample=Sample(None, self.sample.size, []), whole=Run(None, math.nan), splits=[])

    @property
    def shows_nothing(self) -> bool:
        """Whether the samples have no finite loss or no gradient, as without targets."""
        return self.why_not in (NOT_FINITE, NO_GRADIENT)

    @property
    def has_two_gradients(self) -> bool:
        """Whether it could be compared, and two micro-batches of a split have a gradient."""
        if self.why_not:
            return False
        return any(sum(map(_has_gradient, runs)) > 1 for runs in self.splits)

    @property
    def runs(self) -> list[Run]:
        """All runs, the unsplit one first."""
        return [self.whole, *itertools.chain.from_iterable(self.splits)]

    @property
    def parameters(self) -> list[Tensor]:
        """The leaves whose gradients the runs hold."""
        return list(self.whole.entries)

    @property
    def limit(self) -> float:
        """The largest error that counts as rounding."""
        if self.precision == "float64":
            return FLOAT64
        if self.parameters and all(parameter.dtype is torch.float64 for parameter in self.parameters):
            return FLOAT64 if self.in_float32 else _ALL_FLOAT64
        if self.rounding:
            return LOW_PRECISION
        return _FLOAT32

    @property
    def _floor(self) -> float:
        """The share of the average gradient below which gradients are mostly rounding."""
        if self.precision == "float64":
            return 1e-4
        return 0.3 if self.rounding else 1e-2

    def error(self, list_weights: Callable[[list[Run]], list[float]]) -> float:
        """Return the relative error of ``Σ weight · micro-batch``: the largest of the loss and all parameters.

        A parameter whose gradient is far below the average is compared with a share of that instead, but never with
        more than all gradients together.

        Args:
            list_weights: maps the runs of all micro-batches of a sample to their weights.
        """
        return max(self._error(runs, list_weights(runs)) for runs in self.splits)

    def _error(self, runs: list[Run], weights: list[float]) -> float:
        # A micro-batch without counted elements has a mean of NaN, and a weight of 0.
        used = [(weight, run) for weight, run in zip(weights, runs, strict=True) if weight != 0]
        missed, size = self.whole.values, abs(self.whole.loss)
        for weight, run in used:
            missed = missed - weight * run.values
            size = max(size, abs(weight * run.loss))
        if not torch.isfinite(missed).all():
            return float("inf")
        norms, missed_norms = self._norms(self.whole.values), self._norms(missed)
        average = math.sqrt(sum(norm**2 for norm in norms) / max(1, len(norms)))
        error = abs(float(missed[0])) / size if size else 0.0
        for parameter, norm, missed_norm in zip(self.parameters, norms, missed_norms, strict=True):
            floor = _LOW_FLOOR if parameter.dtype in LOW else self._floor
            least = min(floor * average, math.hypot(*norms))
            # 1e-300: if a parameter has no gradient at all, 0 / 0 would be NaN.
            error = max(error, missed_norm / max(norm, least, 1e-300))
        return error

    def _norms(self, values: Tensor) -> list[float]:
        """Return the norm of each parameter's entries."""
        sizes = list(map(Tensor.numel, self.whole.entries.values()))
        return [float(entries.norm()) for entries in values[1:].split(sizes)]


def _has_gradient(run: Run) -> bool:
    return bool(run.values[1:].nan_to_num(0.0).any())


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the norm of ``one - other``, relative to that of ``one``."""
    # 1e-30: if both are zero, 0 / 0 would be NaN.
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


def entries_of(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return some entries of a gradient, spread over it; an odd step meets every column."""
    step = (parameter.numel() // _ENTRIES) | 1
    if gradient is None:
        return torch.zeros(len(range(0, parameter.numel(), step)), dtype=torch.float64)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.detach().reshape(-1)[::step].cpu().double()


_LIBRARIES = ("torch.", "lightning.")  # their functions are the same in every run
_MOST_HELD = 64  # a step may have a whole dataset at hand


def loss_of(output: object) -> Tensor:
    """Return the loss in a step's output: a tensor, or the ``loss`` of a mapping or object.

    Raises:
        TypeError: there is no loss tensor.
        ValueError: the loss is not a scalar.
    """
    loss = loss_in(output, "micro-batches are summed by their mean loss, and the output holds no loss tensor")
    if loss.numel() != 1:
        why = "micro-batches are weighted by their mean loss, which must be a scalar"
        raise ValueError(explain(f"the step returned a loss of shape {tuple(loss.shape)}", why, "Return loss.mean()"))
    return loss.reshape(())


def models_of(step: object) -> list[nn.Module]:
    """Return the modules that a step function reaches: itself, its bound object, closure variables and globals, what
    these hold as attributes or in a list or dict, and what an object that is called holds.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> models_of(lambda batch: net(batch)) == [net]
        True
        >>> class Runner:
        ...     def __init__(self):
        ...         self.inner = net
        ...     def step(self, batch):
        ...         return self.inner(batch)
        >>> models_of(Runner().step) == [net]
        True
    """
    return list(dict.fromkeys(thing for thing in _reach(step) if isinstance(thing, nn.Module)))


def key_of(*functions: object) -> tuple[Any, ...]:
    """Return a key that is equal for functions that do the same: the same code with the same models, helpers and flags.

    A function defined inside a loop is a new object in each iteration, but its code is the same. The key keeps no
    object alive.
    """
    return tuple(map(_reference, itertools.chain.from_iterable(map(_reach, functions))))


def _reference(thing: object) -> object:
    if isinstance(thing, types.FunctionType):
        return weakref.ref(thing.__code__)
    if type(thing).__module__.startswith(_LIBRARIES) and not isinstance(thing, nn.Module):
        return type(thing)  # such as the autocast that decorates a step in every iteration
    try:
        # Not an id, which a later object may reuse: a dead reference equals no other.
        return weakref.ref(thing)
    except TypeError:  # a string, say
        return thing


def _reach(thing: object, depth: int = 3) -> Iterator[object]:
    """Yield the functions, models and flags that ``thing`` uses, itself first."""
    if isinstance(thing, functools.partial):
        yield from _reach_each(thing.func, *thing.args, *thing.keywords.values(), depth=depth)
    elif isinstance(thing, types.MethodType):
        yield from _reach_each(thing.__func__, thing.__self__, depth=depth)
    else:
        yield thing
    is_known = isinstance(thing, nn.Module) or str(getattr(thing, "__module__", "")).startswith(_LIBRARIES)
    if depth <= 0 or is_known:
        return
    called = type(thing).__call__
    if isinstance(thing, types.FunctionType):
        closed_over = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        named = [thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__]
        yield from _reach_each(*closed_over, *named, *(thing.__defaults__ or ()), depth=depth)
    elif isinstance(called, types.FunctionType):  # an object, of which flags may change as it runs
        yield from _reach_each(called, *itertools.filterfalse(_is_flag, _held_by(thing)), depth=depth)


def _reach_each(*things: object, depth: int) -> Iterator[object]:
    for thing in things:
        if _is_flag(thing):
            yield thing
        if isinstance(thing, type | types.ModuleType):
            continue
        if callable(thing):
            yield from _reach(thing, depth - 1)
            continue
        # Such as a list of models, or a training program's own object, a runner with its model.
        for held in _held_by(thing):
            if isinstance(held, nn.Module):
                yield held


def _is_flag(thing: object) -> bool:
    """Whether a loss is likely to depend on a value that stays; a number often changes from step to step."""
    return isinstance(thing, bool | str)


def _held_by(thing: object) -> Iterable[object]:
    """Return what a container or an object holds; of many things, the first."""
    held: Iterable[object] = getattr(thing, "__dict__", {}).values()
    if isinstance(thing, dict):
        held = thing.values()
    elif isinstance(thing, list | tuple | set):
        held = thing
    return itertools.islice(held, _MOST_HELD)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable without a value so far
        return False
