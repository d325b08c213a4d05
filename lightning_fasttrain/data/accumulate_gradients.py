"""The gradient of a whole batch, or of several batches, a part at a time and exact."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fasttrain._messages import explain
from lightning_fasttrain._ranks import rank_count
from lightning_fasttrain.data._part_weights import PartWeights
from lightning_fasttrain.data.count_targets import Count, CountRule, CountTargets, is_sum, named_count, weights_of
from lightning_fasttrain.data.split_batch import split_batch
from lightning_fasttrain.data.trial._step_parts import key_of, loss_of
from lightning_fasttrain.data.trial.find_count import find_count

Step = Callable[[Any], Any]
Backward = Callable[[Tensor], Any]
NoSync = Callable[[], AbstractContextManager[Any]]


def accumulate_gradients(
    step: Step,
    batch: Any,
    n: int,
    *,
    count: Count = "auto",
    check: bool = True,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
) -> Tensor:
    """Add the gradient of ``batch`` to ``.grad`` in ``n`` parts, one part's activations in memory at a time.

    With c_i the number of targets in part i, ℓ_i its mean loss and C = Σ c_i, the loss of the whole batch is
    L = Σ (c_i / C) ℓ_i, so its gradient is the sum of the parts' gradients with these weights; plain averaging
    would be wrong as soon as padding makes the c_i differ. Layers that mix samples (BatchNorm) see one part at a
    time, and dropout draws other masks than for the unsplit batch.

    Args:
        step: a part of the batch → its mean loss (or sum), or a mapping with a ``"loss"``. Runs n times, and some more
            in the first call.
        batch: anything :func:`~lightning_fasttrain.data.split_batch` takes.
        n: number of parts.
        count: what c_i is. ``"auto"`` finds it in the first call with this step, by comparing gradients: see
            :func:`~lightning_fasttrain.data.trial.find_count`. Else ``"targets"``, ``"next_tokens"``, ``"samples"``,
            ``"sum"`` (the parts' losses are added), or a function: batch → the number of terms its mean loss averages
            over, or the sum of their weights.
        check: refuse, in the first call, a loss that cannot be split by ``count``. False goes on, and says with
            ``"auto"`` how far off it is.
        backward: ``fabric.backward`` under Fabric.
        no_sync: a context in which gradients are not synchronised, entered for all parts but the last, forward
            and backward; ``lambda: fabric.no_backward_sync(model)`` under Fabric, ``ddp.no_sync`` for plain DDP.

    Returns:
        The mean loss of the whole batch: a detached 0-dimensional tensor, not waited for.

    Raises:
        ValueError: the batch cannot be split, the loss is not one number, or it cannot be split exactly.

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
    parts = split_batch(batch, n)
    most = n if rank_count() > 1 else len(parts)  # all ranks find the rule together, also where one has a single sample
    counted = _find_weights(step, batch, n, count, check, no_sync, most)
    return _accumulate(step, parts, counted, backward, no_sync, ranks=1)


def accumulate_window(
    step: Step,
    batches: Iterable[Any],
    n: int = 1,
    *,
    count: Count = "auto",
    check: bool = True,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
) -> Tensor:
    """Add the gradient of several batches, as if they were one: every target counts the same, wherever it is.

    L = Σ_k c_k ℓ_k / Σ_k c_k over all batches k of the window, and over all ranks where ``torch.distributed`` is
    initialised; there, ranks may hold different numbers of targets and of batches.

    Args:
        step, count, check, backward: as for :func:`accumulate_gradients`.
        batches: the batches of one optimizer step.
        n: parts that each batch is split into.
        no_sync: as for :func:`accumulate_gradients`; entered for all parts of all batches but the very last.

    Returns:
        This rank's share of the window's mean loss, detached: on one rank the loss, over ranks their sum is it.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.ones(6, 3)
        >>> loss = accumulate_window(lambda x: net(x).pow(2).mean(), [data[:5], data[5:]])
        >>> whole = torch.autograd.grad(net(data).pow(2).mean(), net.weight)[0]
        >>> torch.allclose(net.weight.grad, whole)
        True
    """
    held = list(batches)
    parts = [part for batch in held for part in split_batch(batch, n)]
    if not parts:
        raise ValueError(explain("no batches", "a window without batches has no gradient", "Skip the step"))
    ranks = rank_count()
    # Where there are other ranks, a single part is one of several.
    counted = _find_weights(step, held[0], n, count, check, no_sync, len(parts) * ranks)
    return _accumulate(step, parts, counted, backward, no_sync, ranks)


_found: OrderedDict[Any, CountTargets] = OrderedDict()  # by step and count: what the first call found
_MOST_FOUND = 64  # a program that makes model after model would fill it without end


def _find_weights(
    step: Step, batch: Any, n: int, count: Count, check: bool, no_sync: NoSync, parts: int
) -> CountTargets:
    """What the parts are weighed by, found in the first call with more than one: a single part weighs 1."""
    count = named_count(count)
    if callable(count) and not check:
        return count
    key = key_of(step), count if count == "auto" or isinstance(count, CountRule) else key_of(count)
    if key not in _found and parts > 1:
        _found[key] = find_count(step, batch, n, count=count, check=check, no_sync=no_sync)
        if len(_found) > _MOST_FOUND:
            _found.popitem(last=False)
    # A part that is alone weighs 1: by "sum" nothing is looked for in the batch.
    return _found.get(key, count if callable(count) else CountRule("sum"))


def _accumulate(
    step: Step, parts: Sequence[Any], count: CountTargets, backward: Backward, no_sync: NoSync, ranks: int
) -> Tensor:
    counts, total = weights_of(count, parts)
    if ranks > 1 and not is_sum(count):
        device = counts[0].device if isinstance(counts[0], Tensor) else _any_device(parts[0])
        total = torch.as_tensor(total, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        # All ranks come here or none: they have found the same rule.
        dist.all_reduce(total)
    weights = PartWeights(counts, total)
    loss_sum: Any = 0.0
    for i, part in enumerate(parts):
        with no_sync() if i < len(parts) - 1 else nullcontext():
            loss = weights.weigh(loss_of(step(part)), i)
            backward(loss * ranks if ranks > 1 else loss)  # DDP takes the mean over ranks: make it the sum
        loss_sum = loss_sum + loss.detach()
        del loss  # and with it the part's graph, before the next one is built
    return loss_sum


def _any_device(part: Any) -> torch.device:
    from torch.utils._pytree import tree_leaves

    return next((leaf.device for leaf in tree_leaves(part) if isinstance(leaf, Tensor)), torch.device("cpu"))
