"""Exact gradients of a whole batch, or of several batches, computed one micro-batch at a time."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.distributed import rank_count
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.data.normalizer.count_targets import Count, CountRule, named_count
from lightning_fasttrain.data.normalizer.find_count import find_split_of, stage_of
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.micro_batch_weights import Number
from lightning_fasttrain.data.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.data.normalizer.step_weights import StepWeights
from lightning_fasttrain.data.normalizer.trial.sample_rows import sample_rows
from lightning_fasttrain.data.normalizer.trial.step_function import key_of, loss_of
from lightning_fasttrain.data.normalizer.trial.try_split import Stage
from lightning_fasttrain.data.padding.trim_search import TrimPadding, TrimSearch, check_budget
from lightning_fasttrain.data.split_batch import batch_size, list_tensors
from lightning_fasttrain.data.step_gradients import StepGradients, add_gradients, sum_gradients_in_float32
from lightning_fasttrain.data.trunk.batch_search import (
    OUT_OF_TRIES,
    TRIES,
    BatchSearch,
    Looks,
    prefer_what_shows_something,
)
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk

Step = Callable[[Any], Any]
Backward = Callable[[Tensor], Any]
NoSync = Callable[[], AbstractContextManager[Any]]


def accumulate_gradients(
    step: Step,
    batch: Any,
    n: int | None = None,
    *,
    count: Count = "auto",
    check: bool = True,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
    trim_padding: bool | TrimPadding | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Add the gradient of ``batch`` to ``.grad`` in ``n`` micro-batches, holding the activations of one at a time.

    With c_i the number of targets in micro-batch i, ℓ_i its mean loss and C = Σ c_i, the whole batch has the loss
    L = Σ (c_i / C) ℓ_i, so its gradient is the sum of the micro-batches' gradients with these weights; plain averaging
    would be wrong as soon as padding makes the c_i differ. c_i is read from the graph of ℓ_i, in every micro-batch of
    every batch. A loss that is not such a sum (several normalizers, or samples that depend on one another) is computed
    from the whole batch, while the trunk of the model runs in micro-batches with recomputation: see
    :func:`~lightning_fasttrain.data.micro_batch_forward_`. Dropout draws other masks than for the unsplit batch.

    Args:
        step: maps a micro-batch to its mean loss (or sum), or to a mapping with a ``"loss"``. Runs n times; in the
            first call, and in calls 2, 4, 8, ... while that takes under 1% of the time, it also runs on a few samples.
        batch: anything :func:`~lightning_fasttrain.data.split_batch` takes.
        n: number of micro-batches.
        trim_padding: sort rows by length and cut each micro-batch to its own longest row, and
        max_tokens: a number of tokens instead of n: as for :class:`~lightning_fasttrain.MicroBatching`.
        count: how c_i is obtained. ``"auto"`` reads it from each loss: see
            :func:`~lightning_fasttrain.data.read_normalizers`. Otherwise ``"targets"``, ``"next_tokens"``,
            ``"samples"``, ``"sum"`` (the micro-batch losses are added), or a function that maps a batch to the number
            of terms its mean loss averages over, or to the sum of their weights.
        check: refuse a split that would change the training, before its gradient is used. False uses the nearest
            weighting and reports its error.
        backward: ``fabric.backward`` under Fabric.
        no_sync: a context in which gradients are not synchronized, entered for all micro-batches but the last, forward
            and backward; ``lambda: fabric.no_backward_sync(model)`` under Fabric, ``ddp.no_sync`` for plain DDP.

    Returns:
        The mean loss of the whole batch: a detached 0-dimensional tensor, returned without waiting for the device.

    Raises:
        ValueError: the batch cannot be split, the loss is not a scalar, or neither the loss nor a trunk can be split
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
    trimming = TrimSearch(trim_padding, check_budget(max_tokens, n))
    n = trimming.count_parts(batch, 1 if n is None else positive_int("n", n))
    # A rank with a single sample takes part, too.
    most = n if rank_count() > 1 else min(n, batch_size(batch))
    most = max(most, 2) if trimming.is_asked_for else most  # a single micro-batch is trimmed, too
    key = (*_key(step, named_count(count), is_window=False), *_key_of_trimming(trimming))
    found = _find(key, step, batch, n, count, check, no_sync, most, is_window=False)
    if found.trimming is None:
        found.trimming = trimming
    stage = stage_of(step, no_sync)
    if (n > 1 or trimming.is_asked_for) and (check or trimming.wanted):
        found.look_for_padding(stage, batch, n)
    for attempt in range(TRIES):
        if isinstance(found.split, Trunk):
            trimming.refuse_trunk(found.split)
            return _run_through(found.split, step, batch, n, backward)
        parts = found.trimming.cut(batch, n, in_lockstep=rank_count() > 1 and not stage.may_scale).parts
        gradients = StepGradients(found.split.parameters)
        try:
            return _accumulate(step, parts, found.split, backward, no_sync, 1, gradients)
        except OtherSplitError as error:
            gradients.discard(error)
            search = _search(step, batch, n, "auto", True, no_sync, is_window=False)
            found.split = search.find_another(found.split, error, attempt)
    raise CannotSplitError(OUT_OF_TRIES)


def _run_through(trunk: Trunk, step: Step, batch: Any, n: int, backward: Backward) -> Tensor:
    _, undo = trunk.install(n)
    try:
        loss = loss_of(step(batch))
    finally:
        undo()
    backward(loss)
    return loss.detach()


def accumulate_window(
    step: Step,
    batches: Iterable[Any],
    n: int = 1,
    *,
    count: Count = "auto",
    check: bool = True,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
    trim_padding: bool | TrimPadding | None = None,
) -> Tensor:
    """Add the gradient of several batches as if they were one, so that every target has the same weight.

    L = Σ_k c_k ℓ_k / Σ_k c_k over all batches k of the window, and over all ranks where ``torch.distributed`` is
    initialized; there, ranks may hold different numbers of targets and of batches.

    Args:
        step, count, check, backward, trim_padding: as for :func:`accumulate_gradients`.
        batches: the batches of one optimizer step.
        n: number of micro-batches that each batch is split into.
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
    positive_int("n", n)
    ranks = rank_count()
    # With other ranks, a single micro-batch is one of several.
    trimming = TrimSearch(trim_padding)
    key = (*_key(step, named_count(count), is_window=True), *_key_of_trimming(trimming))
    most = sum(min(n, batch_size(batch)) for batch in held) * ranks
    found = _find(key, step, held[0], n, count, check, no_sync, most, is_window=True)
    trimming = found.trimming = found.trimming or trimming
    stage = stage_of(step, no_sync)
    if (n > 1 or trimming.is_asked_for) and (check or trimming.wanted):
        found.look_for_padding(stage, held[0], n)
    in_lockstep = ranks > 1 and not stage.may_scale
    parts = [part for batch in held for part in trimming.cut(batch, n, in_lockstep=in_lockstep).parts]
    split = found.split
    assert isinstance(split, LossSplit)
    try:
        return _accumulate(step, parts, split, backward, no_sync, ranks, StepGradients(split.parameters))
    except OtherSplitError as error:
        raise CannotSplitError(f"in a window of several batches {error}") from error


@dataclass
class _Found:
    """The split of a step function's loss and its padding, and the batches at which they are checked again."""

    split: LossSplit | Trunk
    looks: Looks
    trimming: TrimSearch | None = None
    trim_looks: Looks = field(default_factory=lambda: Looks(from_first=True))

    def look_for_padding(self, stage: Stage, batch: Any, n: int) -> None:
        """Look for padding in the first batch, and in batches 2, 4, 8, ... while that takes little time."""
        if self.trimming is None or not self.trimming.is_open:
            return
        # All ranks are asked, though one of them may have found another split, or the trunk, by itself.
        is_due = self.trim_looks.is_due(lambda: isinstance(self.split, LossSplit) and not self.split.provisional)
        if is_due and isinstance(self.split, LossSplit):
            with self.trim_looks.timed():
                self.trimming.look_at(stage, batch, self.split, -(-batch_size(batch) // n))


_found: OrderedDict[Any, _Found] = OrderedDict()  # keyed by step and count
_MOST_FOUND = 64  # bounded, for programs that create many models


def _find(
    key: tuple[Any, ...],
    step: Step,
    batch: Any,
    n: int,
    count: Count,
    check: bool,
    no_sync: NoSync,
    parts: int,
    is_window: bool,
) -> _Found:
    """Return how the loss is split, searching in the first call with several micro-batches (one alone has weight 1)."""
    count = named_count(count)
    if callable(count) and not check:
        return _Found(LossSplit(None, count), Looks())
    known = _found.get(key)
    if known is None and parts == 1:  # "sum" needs no labels in the batch
        return _Found(LossSplit(None, count if callable(count) else CountRule("sum")), Looks())
    looks = Looks() if known is None else known.looks

    def may_show_more() -> bool:
        reads = known is not None and isinstance(known.split, LossSplit) and known.split.read is not None
        return reads and check and not is_window and batch_size(batch) > 1

    is_due = looks.is_due(may_show_more)
    has_shown_nothing = known is not None and isinstance(known.split, LossSplit) and known.split.provisional
    if known is None or has_shown_nothing or is_due:
        before = None if known is None else known.split
        with looks.timed():
            split = _search(step, batch, n, count, check, no_sync, is_window).find(together=True)
        split = prefer_what_shows_something(split, before)
        assert split is not None  # this stage refuses a step that returns None
        known = _found[key] = _Found(split, looks) if known is None else replace(known, split=split)
        if len(_found) > _MOST_FOUND:
            _found.popitem(last=False)
    return known


def _search(step: Step, batch: Any, n: int, count: Count, check: bool, no_sync: NoSync, is_window: bool) -> BatchSearch:
    def find_split(together: bool) -> LossSplit:
        return find_split_of(
            step,
            batch,
            n,
            count=count,
            check=check,
            no_sync=no_sync,
            whole_batches=is_window and n == 1,
            together=together,
        )

    return BatchSearch(
        "accumulate_gradients",
        stage_of(step, no_sync),
        batch,
        n,
        lambda: sample_rows(batch, -(-batch_size(batch) // n)),
        find_split,
        may_use_trunk=count == "auto" and not is_window,  # a trunk cannot run several batches as one
    )


def _key(step: Step, count: Count, is_window: bool) -> tuple[Any, ...]:
    return key_of(step), count if count == "auto" or isinstance(count, CountRule) else key_of(count), is_window


def _key_of_trimming(trimming: TrimSearch) -> tuple[Any, ...]:
    lengths = trimming.how.lengths
    source = key_of(lengths) if callable(lengths) else lengths
    return source, trimming.how.multiple_of, trimming.wanted, trimming.max_tokens


def _accumulate(
    step: Step,
    parts: Sequence[Any],
    split: LossSplit,
    backward: Backward,
    no_sync: NoSync,
    ranks: int,
    gradients: StepGradients,
) -> Tensor:
    over_ranks = functools.partial(_sum_over_ranks, parts[0]) if ranks > 1 else None
    weights = StepWeights(split, parts, over_ranks=over_ranks)

    def add_share(loss: Tensor) -> None:
        backward(loss * ranks if ranks > 1 else loss)  # DDP averages over ranks; make it the sum

    with sum_gradients_in_float32(split.parameters if len(parts) > 1 else ()) as sums:
        add_gradients(
            parts,
            weights,
            lambda part, _: loss_of(step(part)),
            add_share,
            gradients=gradients if weights.known is None else None,
            sums=sums,
            no_sync=no_sync,
            is_shared=rank_count() > 1,
        )
    return weights.loss()


def _sum_over_ranks(example: Any, number: Number) -> Tensor:
    device = next((leaf.device for leaf in list_tensors(example).values()), torch.device("cpu"))
    if isinstance(number, Tensor):
        device = number.device
    total = torch.as_tensor(number, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    total = total.clone()
    dist.all_reduce(total)
    return total
