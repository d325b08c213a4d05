"""The gradient of a whole batch, or of several batches, a part at a time and exact."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fasttrain._messages import explain
from lightning_fasttrain.data.count_targets import Count, count_targets
from lightning_fasttrain.data.split_batch import split_batch

Step = Callable[[Any], Any]
Backward = Callable[[Tensor], Any]
NoSync = Callable[[], AbstractContextManager[Any]]


def accumulate_gradients(
    step: Step,
    batch: Any,
    n: int,
    *,
    count: Count = count_targets,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
) -> Tensor:
    """Add the gradient of ``batch`` to ``.grad`` in ``n`` parts, one part's activations in memory at a time.

    With c_i the number of targets in part i, ℓ_i its mean loss and C = Σ c_i, the loss of the whole batch is
    L = Σ (c_i / C) ℓ_i, so its gradient is the sum of the parts' gradients with these weights; plain averaging
    would be wrong as soon as padding makes the c_i differ. Layers that mix samples (BatchNorm) see one part at a
    time, and dropout draws other masks than for the unsplit batch.

    Args:
        step: a part of the batch → its mean loss, or a mapping with a ``"loss"``. Runs n times.
        batch: anything :func:`~lightning_fasttrain.split_batch` takes.
        n: number of parts.
        count: batch → the number of terms its mean loss averages over, or the sum of their weights.
        backward: ``fabric.backward`` under Fabric.
        no_sync: a context in which gradients are not synchronised, entered for all parts but the last, forward
            and backward; ``lambda: fabric.no_backward_sync(model)`` under Fabric, ``ddp.no_sync`` for plain DDP.

    Returns:
        The mean loss of the whole batch: a detached 0-dimensional tensor, not waited for.

    Raises:
        ValueError: the batch cannot be split, or the loss is not one number.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.ones(6, 3)
        >>> loss = accumulate_gradients(lambda x: net(x).pow(2).mean(), data, n=4)
        >>> whole = torch.autograd.grad(net(data).pow(2).mean(), net.weight)[0]
        >>> torch.allclose(net.weight.grad, whole)
        True

    Source:
        The weighting is that of Hugging Face transformers (pull request 34191) and torchtitan's
        ``global_valid_tokens``, here per micro-batch of one batch.
    """
    return _accumulate(step, split_batch(batch, n), count, backward, no_sync, ranks=1)


def accumulate_window(
    step: Step,
    batches: Iterable[Any],
    n: int = 1,
    *,
    count: Count = count_targets,
    backward: Backward = torch.Tensor.backward,
    no_sync: NoSync = nullcontext,
) -> Tensor:
    """Add the gradient of several batches, as if they were one: every target counts the same, wherever it is.

    L = Σ_k c_k ℓ_k / Σ_k c_k over all batches k of the window, and over all ranks where ``torch.distributed`` is
    initialised; there, ranks may hold different numbers of targets and of batches.

    Args:
        step: as for :func:`accumulate_gradients`.
        batches: the batches of one optimizer step.
        n: parts that each batch is split into.
        count: as for :func:`accumulate_gradients`.
        backward: as for :func:`accumulate_gradients`.
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
    parts = [part for batch in batches for part in split_batch(batch, n)]
    if not parts:
        raise ValueError(explain("no batches", "a window without batches has no gradient", "Skip the step"))
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return _accumulate(step, parts, count, backward, no_sync, ranks)


def _accumulate(
    step: Step, parts: Sequence[Any], count: Count, backward: Backward, no_sync: NoSync, ranks: int
) -> Tensor:
    counts = [count(part) for part in parts]
    total: Any = sum(counts)
    if ranks > 1:
        device = counts[0].device if isinstance(counts[0], Tensor) else _any_device(parts[0])
        total = torch.as_tensor(total, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        dist.all_reduce(total)
    loss_sum: Any = 0.0
    for i, (part, c) in enumerate(zip(parts, counts, strict=True)):
        with no_sync() if i < len(parts) - 1 else nullcontext():
            loss = weigh(loss_of(step(part)), c, total)
            backward(loss * ranks if ranks > 1 else loss)  # DDP takes the mean over ranks: make it the sum
        loss_sum = loss_sum + loss.detach()
        del loss  # and with it the part's graph, before the next one is built
    return loss_sum


def weigh(loss: Tensor, count: Tensor | float, total: Tensor | float) -> Tensor:
    """``loss · count / total``, and a true zero where nothing was counted, though the mean of nothing is NaN."""
    # At least float32: a weight such as 1/3 keeps only three digits in bfloat16.
    dtype = torch.promote_types(loss.dtype, torch.float32)
    c, t = (
        x.to(device=loss.device, dtype=dtype)
        if isinstance(x, Tensor)
        else torch.full((), x, dtype=dtype, device=loss.device)
        for x in (count, total)
    )
    t = torch.where(t > 0, t, torch.ones_like(t))  # nothing is divided by 0, nor is a total below 1 mistaken for 1
    return torch.where(c > 0, loss * (c / t), torch.zeros_like(c))


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returned: a tensor, or a mapping or object with a ``loss``.

    Raises:
        TypeError: there is none.
        ValueError: it is not one number.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            explain(
                f"the step returned {type(output).__name__}",
                "micro-batches are summed by their mean loss, and there is no loss tensor in it",
                "Return the loss, or a dict with a 'loss'",
            )
        )
    if loss.numel() != 1:
        raise ValueError(
            explain(
                f"the step returned a loss of shape {tuple(loss.shape)}",
                "micro-batches are weighed by their mean loss, which is one number",
                "Return loss.mean()",
            )
        )
    return loss.reshape(())


def _any_device(part: Any) -> torch.device:
    from torch.utils._pytree import tree_leaves

    return next((leaf.device for leaf in tree_leaves(part) if isinstance(leaf, Tensor)), torch.device("cpu"))
