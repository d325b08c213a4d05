"""The loss of a few tokens from their logits, with the gradient, which replaces the logits in their memory."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_fasttrain.core.device import kernels_of
from lightning_fasttrain.core.modules.heads import VocabularyShard
from lightning_fasttrain.loss.chunked import at_least_float32

# Logits that are in float32 at a time: as many as fit in the caches of a CPU, or in 256 MiB, which keep a GPU busy.
_ROWS_OF_CPU, _ROWS_OF_GPU = 2**18, 2**26
_COMPARED = 16  # rows
_TRUSTED: set[tuple[object, ...]] = set()  # cases in which compiled code agreed with eager code
Options = tuple[float, float, float | None]  # label smoothing, z-loss, softcap


class MiscompiledError(RuntimeError):
    """Compiled code computed something else than eager code."""


def use_logits(
    logits: Tensor,
    targets: Tensor,
    options: Options,
    compiled: bool = False,
    share: Tensor | None = None,
    with_gradient: bool = True,
    class_weights: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the loss of each token of a chunk; the gradient replaces the logits in place, rounded once.

    This is done for some rows at a time, so that few logits are in float32: on a CPU as many as stay in its cache from
    the first operation to the last.

    Args:
        logits: (T, V).
        targets: (T,), valid classes.
        options: label smoothing, z-loss and softcap.
        compiled: whether compiled code computes it.
        share: (T,), a factor of the gradient of each token.
        with_gradient: whether the gradient is needed; otherwise the logits may keep their values.
        class_weights: (V,), in at least float32; None for 1.
        shard: the classes that the logits are of, (T, share of V); None for all. The other ranks have the others.
    """
    if share is not None:
        share = share[:, None]
    if compiled and with_gradient and not torch.compiler.is_compiling():
        if isinstance(logits, FakeTensor):  # compiled code stores nothing but the losses, and the gradient in place
            logits.amax(1)  # the first of its two passes
            logits.mul_(1)
            return logits.new_empty(len(logits), dtype=at_least_float32(logits))
        return _use_compiled(logits, targets[:, None], options, share, class_weights)
    losses = torch.empty(len(logits), dtype=at_least_float32(logits), device=logits.device)
    rows = len(logits)
    # Ranks reduce together, so that all have the same number of rounds.
    if not torch.compiler.is_compiling() and shard is None:
        rows = (_ROWS_OF_CPU if kernels_of(logits) == "cpu" else _ROWS_OF_GPU) // logits.shape[1]
    rows = max(1, rows)
    for start in range(0, len(logits), rows):
        some = slice(start, start + rows)
        losses[some], gradient = _loss_of_rows(logits[some], targets[some, None], options, class_weights, shard)
        if with_gradient:
            if share is not None:
                gradient.mul_(share[some])
            logits[some] = gradient
        del gradient  # before the next is allocated
    return losses


def _use_compiled(
    logits: Tensor, targets: Tensor, options: Options, share: Tensor | None, class_weights: Tensor | None
) -> Tensor:
    """Compute :func:`use_logits` by compiled code, whose first results are compared with those of eager code."""
    case = (logits.shape[1], logits.dtype, logits.device, options, share is None, class_weights is None)
    if case in _TRUSTED:
        return _compiled_use()(logits, targets, options, share, class_weights)
    some = slice(0, _COMPARED)
    before = logits[some].clone()
    losses = _compiled_use()(logits, targets, options, share, class_weights)
    expected, gradient = _loss_of_rows(before, targets[some], options, class_weights)
    if share is not None:
        gradient *= share[some]
    if not gradient.isfinite().all():
        return losses
    for seen, wanted in ((losses[some], expected), (logits[some], gradient)):
        apart = (seen.to(wanted.dtype) - wanted).abs().amax()
        if not apart <= 8 * torch.finfo(seen.dtype).eps * wanted.abs().amax():
            raise MiscompiledError(f"compiled code computes another loss or gradient, {float(apart):.1e} off")
    _TRUSTED.add(case)
    return losses


@functools.cache
def _compiled_use() -> Callable[..., Tensor]:
    return torch.compile(_use_logits_in_two_passes)


def _use_logits_in_two_passes(
    logits: Tensor, targets: Tensor, options: Options, share: Tensor | None, class_weights: Tensor | None = None
) -> Tensor:
    """Compute :func:`use_logits` in operations that a compiler fuses.

    One pass over the logits sums their exponentials, one replaces them with the gradient. Uncompiled, it would allocate
    eight tensors of their size."""
    smoothing, z_loss, softcap = options
    scores = logits.to(at_least_float32(logits))
    slope: Tensor | float = 1.0
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = bent * softcap, 1 - bent * bent
    lse = torch.logsumexp(scores, dim=1, keepdim=True)
    own, mean, spread = _weights_of(targets, class_weights)
    weighted = scores
    if class_weights is not None:
        weighted = scores * class_weights
    losses = own * ((1 - smoothing) * (lse - scores.gather(1, targets)) + z_loss * lse * lse)
    losses = losses + smoothing * (mean * lse - weighted.mean(dim=1, keepdim=True))
    # A comparison, since a scatter would be a separate pass.
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets
    total = own * (1 - smoothing + 2 * z_loss * lse) + smoothing * mean
    gradient = (scores - lse).exp() * total - spread * (smoothing / logits.shape[1])
    gradient = torch.where(is_target, gradient - (1 - smoothing) * own, gradient) * slope
    if share is not None:
        gradient = gradient * share
    logits.copy_(gradient)
    return losses[:, 0]


def _weights_of(targets: Tensor, class_weights: Tensor | None) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """Return the class weights of the targets (T, 1), their mean over all classes, and all of them (V,)."""
    if class_weights is None:
        return 1.0, 1.0, 1.0
    return class_weights[targets], class_weights.mean(), class_weights


def _mean_over_classes(logits: Tensor, class_weights: Tensor | float, classes: int) -> Tensor:
    dtype = at_least_float32(logits)
    if isinstance(class_weights, Tensor):
        return (logits.to(dtype) @ class_weights)[:, None] / classes
    return logits.sum(dim=1, keepdim=True, dtype=dtype) / classes


def _loss_of_rows(
    logits: Tensor,
    targets: Tensor,
    options: Options,
    class_weights: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses of a few tokens (T,), and their gradient (T, V), in at least float32."""
    smoothing, z_loss, softcap = options
    dtype = at_least_float32(logits)
    slope = None
    if softcap is not None:
        bent = torch.div(logits.to(dtype), softcap).tanh_()
        slope = bent.square().neg_().add_(1)
        logits = bent.mul_(softcap)
    shares = torch.softmax(logits, dim=1, dtype=dtype)
    # The largest probability is exp(max z − lse), so lse needs no exponentials beside softmax's.
    lse = logits.amax(dim=1, keepdim=True) - shares.amax(dim=1, keepdim=True).log_()
    own, mean, spread = _weights_of(targets, class_weights)
    subtrahend = torch.full_like(lse, smoothing - 1) * own
    classes, mine = logits.shape[1], None
    if shard is not None:
        classes, (mine, targets) = shard.classes, shard.find(targets)
        spread = shard.take(spread) if isinstance(spread, Tensor) else spread
        subtrahend = torch.where(mine, subtrahend, 0.0)
    of_target = logits.gather(1, targets).to(dtype)
    average = _mean_over_classes(logits, spread, classes) if smoothing else torch.zeros_like(lse)
    if shard is not None and mine is not None:
        of_mine, lse = lse, shard.logsumexp(lse)
        shares *= (of_mine - lse).exp()
        of_target, average = shard.sum(torch.where(mine, of_target, 0.0), average)
    # The gradient by z is p · total − ε w / V − (1 − ε) w_y at the target; only the first summand contains p.
    total: Tensor | float = 1.0
    if class_weights is not None:
        total = (1 - smoothing) * own + smoothing * mean
    losses = total * lse - (1 - smoothing) * own * of_target
    if smoothing:
        losses -= smoothing * average
    if z_loss:
        losses += z_loss * own * lse.square()
        total = total + 2 * z_loss * own * lse
    if z_loss or class_weights is not None:
        shares *= total
    if smoothing:
        shares -= spread * (smoothing / classes)
    shares.scatter_add_(1, targets, subtrahend)
    if slope is not None:
        shares.mul_(slope)
    return losses[:, 0], shares
