"""Exact gradients of a whole batch, or of several batches, computed one micro-batch at a time."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fasttrain.core.batch.leaves import batch_size, list_tensors
from lightning_fasttrain.core.checks import Batch, PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import from_all_ranks, rank_count
from lightning_fasttrain.core.host.lightning import FabricModule
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.micro_batching.find_backbone import (
    OUT_OF_TRIES,
    TRIES,
    BatchSearch,
    Found,
    guess_split,
    is_guess,
)
from lightning_fasttrain.micro_batching.micro_batch_forward import Backbone
from lightning_fasttrain.micro_batching.micro_batch_graphs import MicroBatchGraphs, refuse_graphs, refuse_off_cuda
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count, CountRule, named_count
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError, trial_step_of
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit, OtherSplitError, WholeBatchNormalizer
from lightning_fasttrain.micro_batching.normalizer.step_weights import StepWeights, refuse_mismatch
from lightning_fasttrain.micro_batching.padding.trim_search import TrimPadding, TrimSearch, check_budget
from lightning_fasttrain.micro_batching.step_gradients import StepGradients, add_gradients, sum_gradients_in_float32
from lightning_fasttrain.trial.read_normalizers import Number
from lightning_fasttrain.trial.runs import key_of, loss_of
from lightning_fasttrain.trial.try_split import TrialSchedule

Step = Callable[[Any], Any]
Backward = Callable[[Tensor], Any]
NoSync = Callable[[], AbstractContextManager[Any]]


@check_arguments
def accumulate_gradients(
    step: Step,
    batch: Batch,
    n: PositiveInt | None = None,
    *,
    count: Count = "auto",
    check: bool = True,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
    trim_padding: bool | TrimPadding | None = None,
    max_tokens: PositiveInt | None = None,
    cuda_graph: bool | None = None,
) -> Tensor:
    """Add the gradient of ``batch`` to ``.grad`` in ``n`` micro-batches, holding the activations of one at a time.

    With c_i the number of targets in micro-batch i, ℓ_i its mean loss and C = Σ c_i, the whole batch has the loss
    L = Σ (c_i / C) ℓ_i, so its gradient is the sum of the micro-batches' gradients with these weights; plain averaging
    would be wrong as soon as padding makes the c_i differ. c_i is read from the graph of ℓ_i, in every micro-batch of
    every batch. A loss that is not such a sum (several normalizers, or samples that depend on one another) is computed
    from the whole batch, while the backbone of the model runs in micro-batches with recomputation: see
    :func:`~lightning_fasttrain.micro_batching.micro_batch_forward_`. Dropout draws other masks than for the unsplit
    batch.

    Args:
        step: maps a micro-batch to its mean loss (or sum), or to a mapping with a ``"loss"``. Runs n times; in the
            first call, and in calls 2, 4, 8, ... while that takes under 1% of the time, it also runs on a few samples.
        batch: anything :func:`~lightning_fasttrain.micro_batching.split_batch` takes.
        n: number of micro-batches.
        trim_padding: sort rows by length and cut each micro-batch to its own longest row, and
        max_tokens: a number of tokens instead of n: as for :class:`~lightning_fasttrain.MicroBatching`.
        count: how c_i is obtained. ``"auto"`` reads it from each loss: see
            :func:`~lightning_fasttrain.micro_batching.read_normalizers`. Otherwise ``"targets"``, ``"next_tokens"``,
            ``"samples"``, ``"sum"`` (the micro-batch losses are added), or a function that maps a batch to the number
            of terms its mean loss averages over, or to the sum of their weights.
        check: refuse a split that would change the training, before its gradient is used. False uses the nearest
            weighting and reports its error.
        backward: ``fabric.backward`` under Fabric.
        cuda_graph: as for :class:`~lightning_fasttrain.MicroBatching`; the host waits for the device once a call, to
            learn whether weights were right.
        no_sync: a context in which gradients are not synchronized, entered for all micro-batches but the last, forward
            and backward; ``lambda: fabric.no_backward_sync(model)`` under Fabric, ``ddp.no_sync`` for plain DDP.

    Returns:
        The mean loss of the whole batch: a detached 0-dimensional tensor, returned without waiting for the device.

    Raises:
        TypeError: ``step`` is a model that takes the entries of the batch by name, or not a function of a batch.
        ValueError: the batch cannot be split, the loss is not a scalar, or neither the loss nor a backbone can be split
            exactly, for instance with BatchNorm in training mode.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.randn(6, 3)
        >>> loss = accumulate_gradients(lambda x: net(x).pow(2).mean(), data, n=4)
        >>> whole = torch.autograd.grad(net(data).pow(2).mean(), net.weight)[0]
        >>> torch.allclose(net.weight.grad, whole)
        True

    Source:
        The weighting is that of Hugging Face transformers (pull request 34191) and torchtitan's
        ``global_valid_tokens``, here per micro-batch of one batch.
    """
    _refuse_model_as_step(step, batch)
    trimming = TrimSearch(trim_padding, check_budget(max_tokens, n))
    n = trimming.count_parts(batch, n or 1)
    # A rank with a single sample takes part, too.
    most = n if rank_count() > 1 else min(n, batch_size(batch))
    if cuda_graph:
        refuse_off_cuda(next((leaf.device for leaf in list_tensors(batch).values()), torch.device("cpu")))
    if trimming.is_asked_for:
        most = max(most, 2)  # a single micro-batch is trimmed, too
    call = _Call(step, n, count, check, backward, no_sync)
    found = call.find([batch], most, trimming)
    for attempt in range(TRIES):
        if isinstance(found.split, Backbone):
            trimming.refuse_backbone(found.split)
            return _run_through(found.split, step, batch, n, backward)
        gradients = StepGradients(found.split.parameters)
        try:
            parts = call.cut(batch, n, found.trimming)
            with found.trimming.attention():
                if cuda_graph and len(parts) > 1:
                    found.graphs = call.graphs_of(found, parts)
                return call.accumulate(parts, found.split, gradients, found.graphs if cuda_graph else None)
        except OtherSplitError as error:
            gradients.discard(error)
            search = replace(call, count="auto", check=True).search(batch)
            found.split = search.find_another(found.split, error, attempt)
    raise CannotSplitError(OUT_OF_TRIES)


def _refuse_model_as_step(step: Step, batch: object) -> None:
    """Refuse a model whose forward takes the entries of the batch by name, where a function of the batch is needed."""
    if not isinstance(step, nn.Module) or not isinstance(batch, Mapping):
        return
    model = step.module if isinstance(step, FabricModule) else step
    entries = [name for name in inspect.signature(model.forward).parameters if name in batch]
    if entries:
        why = f"a step is called with the batch, and this forward takes {', '.join(entries)} by name"
        way_out = "Pass a function that returns the loss, such as lambda batch: model(**batch).loss"
        raise TypeError(explain(f"step={type(model).__name__}", why, way_out))


def _run_through(backbone: Backbone, step: Step, batch: object, n: int, backward: Backward) -> Tensor:
    _, undo = backbone.install(n)
    try:
        loss = loss_of(step(batch))
    finally:
        undo()
    backward(loss)
    return loss.detach()


@check_arguments
def accumulate_window(
    step: Step,
    batches: Iterable[object],
    n: PositiveInt | None = None,
    *,
    count: Count = "auto",
    check: bool = True,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
    trim_padding: bool | TrimPadding | None = None,
    max_tokens: PositiveInt | None = None,
) -> Tensor:
    """Add the gradient of several batches as if they were one, so that every target has the same weight.

    L = Σ_k c_k ℓ_k / Σ_k c_k over all batches k of the window, and over all ranks where ``torch.distributed`` is
    initialized; there, ranks may hold different numbers of targets and of batches.

    Args:
        step, count, check, backward, trim_padding, max_tokens: as for :func:`accumulate_gradients`.
        batches: the batches of one optimizer step.
        n: number of micro-batches that each batch is split into; by default one, or as many as ``max_tokens`` needs.
        no_sync: as for :func:`accumulate_gradients`; entered for all micro-batches of the window but the very last.

    Returns:
        This rank's share of the window's mean loss, detached: the loss on one rank; over several, their sum is the
        loss.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.ones(6, 3)
        >>> loss = accumulate_window(lambda x: net(x).pow(2).mean(), [data[:5], data[5:]])
        >>> whole = torch.autograd.grad(net(data).pow(2).mean(), net.weight)[0]
        >>> torch.allclose(net.weight.grad, whole)
        True
    """
    held = list(batches)
    if not held:
        raise ValueError(explain("no batches", "a window without batches has no gradient", "Skip the step"))
    if max_tokens is None:
        n = n or 1
    trimming = TrimSearch(trim_padding, check_budget(max_tokens, n))
    n = n or 1
    numbers = [trimming.count_parts(batch, n) for batch in held]
    # With other ranks, a single micro-batch is one of several.
    most = sum(min(number, batch_size(batch)) for number, batch in zip(numbers, held, strict=True)) * rank_count()
    least = 2 if trimming.is_asked_for else 1  # a single micro-batch is trimmed, too
    call = _Call(step, max(*numbers, least), count, check, backward, no_sync, is_window=True)
    found = call.find(held, max(most, least), trimming)
    parts: list[Any] = []
    for number, batch in zip(numbers, held, strict=True):
        parts += call.cut(batch, number, found.trimming)
    assert isinstance(found.split, LossSplit)
    gradients = StepGradients(found.split.parameters)
    try:
        with found.trimming.attention():
            return call.accumulate(parts, found.split, gradients)
    except OtherSplitError as error:
        if len(parts) != len(held) or rank_count() > 1 or isinstance(found.split.read, WholeBatchNormalizer):
            raise CannotSplitError(f"in a window of several batches {error}", of_window=True) from error
        gradients.discard(error)
    # Each batch is unsplit, so that its own loss shows its weight.
    split = LossSplit(WholeBatchNormalizer(), None, leaves=found.split.leaves)
    try:
        return call.accumulate(parts, split, StepGradients(split.parameters))
    except OtherSplitError as error:
        raise CannotSplitError(f"in a window of several batches {error}", of_window=True) from error


@dataclass
class _Found:
    """Rules for splitting the loss of a step function and cutting its padding off, and when they are checked again."""

    split: Found
    trimming: TrimSearch
    trial_schedule: TrialSchedule = field(default_factory=TrialSchedule)
    graphs: MicroBatchGraphs | None = None


_found: OrderedDict[Any, _Found] = OrderedDict()  # keyed by step and count
_MOST_FOUND = 64  # bounded, for programs that create many models


@dataclass
class _Call:
    """Arguments of one call of :func:`accumulate_gradients` or :func:`accumulate_window`."""

    step: Step
    n: int
    count: Count
    check: bool
    backward: Backward
    no_sync: NoSync
    is_window: bool = False

    def __post_init__(self) -> None:
        self.count = named_count(self.count)
        self.trial_step = trial_step_of(self.step, self.no_sync)

    def find(self, batches: Sequence[object], most: int, trimming: TrimSearch) -> _Found:
        """Return how the loss is split and its padding cut off, as the first of the batches with targets shows it.

        All ranks have ``most`` micro-batches together.
        """
        batch, *others = batches
        found = self._find_split(batch, most, trimming)
        if self.is_window and most > 1 and is_guess(found.split):
            # Ranks search together, and may hold different numbers of batches.
            for place in range(max(from_all_ranks([len(others)]))):
                batch = batches[min(place + 1, len(others))]
                found = self._find_split(batch, most, trimming)
                if not is_guess(found.split):
                    break
        if self.n > 1 or trimming.is_asked_for:
            split = found.split if isinstance(found.split, LossSplit) else None
            found.trimming.examine(lambda: self.trial_step, batch, split, self.n, self.check)
        return found

    def _find_split(self, batch: object, most: int, trimming: TrimSearch) -> _Found:
        """Search in the first call with several micro-batches (one alone has weight 1), and where one may show more."""
        key = self._key(trimming)
        if callable(self.count) and not self.check:
            return self._remember(key, _found.get(key) or _Found(LossSplit(None, self.count), trimming))
        known = _found.get(key)
        if known is None and most == 1:  # "sum" needs no labels in the batch
            return _Found(LossSplit(None, self.count if callable(self.count) else CountRule("sum")), trimming)
        known = known or _Found(guess_split(), trimming)
        is_due = known.trial_schedule.is_due(lambda: self._may_show_more(known.split, batch))
        if is_due or is_guess(known.split):
            with known.trial_schedule.timed():
                known.split = self.search(batch).find(known.split)
            self._remember(key, known)
        return known

    @staticmethod
    def _remember(key: object, found: _Found) -> _Found:
        _found[key] = found
        if len(_found) > _MOST_FOUND:
            _found.popitem(last=False)
        return found

    def _may_show_more(self, split: Found, batch: object) -> bool:
        """Whether a later batch could refute a split: one that is read, and was checked on rows of one batch."""
        is_read = isinstance(split, LossSplit) and split.read is not None
        return is_read and self.check and not self.is_window and batch_size(batch) > 1

    def _key(self, trimming: TrimSearch) -> tuple[Any, ...]:
        """Return a key that is equal for calls of the same function with the same settings."""
        how = trimming.how
        key = (key_of(self.step), _key_of(self.count), self.is_window, _key_of(how.lengths))
        return (*key, how.multiple_of, trimming.wanted, trimming.max_tokens)

    def search(self, batch: object) -> BatchSearch:
        """Return the search on a batch."""
        return BatchSearch(
            self.trial_step,
            batch,
            self.n,
            count=self.count,
            check=self.check,
            is_window=self.is_window,
            whole_batches=self.is_window and self.n == 1,
        )

    def cut(self, batch: object, n: int, trimming: TrimSearch) -> Sequence[Any]:
        """Return the ``n`` micro-batches of a batch, or as many as its budget of tokens needs."""
        in_lockstep = rank_count() > 1 and not self.trial_step.may_scale
        return trimming.cut(batch, n, in_lockstep=in_lockstep).parts

    def graphs_of(self, found: _Found, parts: Sequence[object]) -> MicroBatchGraphs:
        """Return the graphs of this step's micro-batches. Raises: ValueError: they would leave something out."""
        assert isinstance(found.split, LossSplit)
        if rank_count() > 1:
            why, way_out = "gradients are averaged in the backward", "Leave cuda_graph out"
            raise ValueError(explain("cuda_graph=True with several processes", why, way_out))
        models = self.trial_step.models
        if not models:
            why, way_out = "its parameters are not known", "Use the model, or a method of it, as step"
            raise ValueError(explain("cuda_graph=True with a step in which no model was found", why, way_out))
        if found.graphs is None:
            refuse_graphs(models, None, found.split)
            parameters = found.split.parameters or [one for model in models for one in model.parameters()]
            device = next(leaf.device for leaf in list_tensors(parts).values())
            found.graphs = MicroBatchGraphs(models, parameters, device)
        return found.graphs

    def accumulate(
        self,
        parts: Sequence[object],
        split: LossSplit,
        gradients: StepGradients,
        graphs: MicroBatchGraphs | None = None,
    ) -> Tensor:
        """Add the gradients of the micro-batches, and return their loss: in a window, this rank's share of it."""
        ranks = rank_count() if self.is_window else 1
        over_ranks = functools.partial(_sum_over_ranks, parts[0]) if ranks > 1 else None
        weights = StepWeights(split, parts, over_ranks=over_ranks)

        def add_share(loss: Tensor) -> None:
            if not loss.requires_grad:
                why = "the step has detached it, or runs under torch.no_grad()"
                raise ValueError(
                    explain("a loss without a gradient", why, "Return the loss itself, and enable gradients")
                )
            if ranks > 1:
                loss = loss * ranks  # DDP averages over ranks; make it the sum
            self.backward(loss)

        def replay(part: object, i: int) -> bool:
            forward = lambda part, _: (loss_of(self.step(part)), None)  # noqa: E731
            return graphs is not None and graphs.run(part, i, weights, forward, add_share) is not None

        with sum_gradients_in_float32(split.parameters if len(parts) > 1 else ()) as sums:
            if graphs is not None:
                graphs.begin_batch(weights)
            add_gradients(
                parts,
                weights,
                lambda part, _: loss_of(self.step(part)),
                add_share,
                gradients=gradients if weights.known is None else None,
                sums=sums,
                no_sync=self.no_sync,
                is_shared=rank_count() > 1,
                replay=replay,
            )
        if graphs is not None and graphs.has_mismatch():
            refuse_mismatch(is_shared=False)
        return weights.loss()


def _key_of(given: object) -> object:
    """Return the key of a user's function; rules and other settings are their own."""
    if callable(given) and not isinstance(given, CountRule):
        return key_of(given)
    return given


def _sum_over_ranks(example: object, number: Number) -> Tensor:
    device = next((leaf.device for leaf in list_tensors(example).values()), torch.device("cpu"))
    if isinstance(number, Tensor):
        device = number.device
    total = torch.as_tensor(number, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    total = total.clone()
    dist.all_reduce(total)
    return total
