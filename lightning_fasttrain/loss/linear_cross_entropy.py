"""Cross-entropy computed directly from hidden states, with the logits of a few tokens at a time."""

import dataclasses
import functools
import os

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_fasttrain.core.checks import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
    check_arguments,
    one_of,
    require,
)
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.heads import (
    VocabularyShard,
    is_split_by_rows,
    on_all_ranks,
    share_of_gradient,
)
from lightning_fasttrain.core.modules.recomputation import refuse_second_derivative, refuse_transforms
from lightning_fasttrain.loss.chunked import ChunkedLoss, OfChunk, at_least_float32, autocast_dtype, cast, chunk_size
from lightning_fasttrain.loss.logit_losses import Options, use_logits

BACKENDS = ("auto", "chunked", "compiled", "liger", "torch")
_NAME = "linear_cross_entropy"
_WAY_OUT = "Use F.cross_entropy of the logits, hidden @ weight.T, instead, and remove FusedLossHead"


@check_arguments
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
    label_smoothing: Share = 0.0,
    reduction: str = "mean",
    z_loss: NonNegativeFloat = 0.0,
    softcap: PositiveFloat | None = None,
    chunk: PositiveInt | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Compute ``cross_entropy(hidden @ weight.T + bias, targets)`` without storing the logits.

    With logits :math:`z = c \tanh((W h + b) / c)` (:math:`c` = ``softcap``; none by default) and
    :math:`\ell = \log \sum_j e^{z_j}`, the loss of a token is
    :math:`w_y [(1 - ε)(\ell - z_y) + ζ \ell^2] + \frac{ε}{V} \sum_j w_j (\ell - z_j)` with w = ``class_weights`` (1 by
    default), ε = ``label_smoothing`` and ζ = ``z_loss``.

    Logits are computed for ``chunk`` tokens at a time and used at once: for ``"mean"`` and ``"sum"`` the gradients are
    computed with them in the forward, so nothing is computed twice; for ``"none"`` they are recomputed in the backward.
    Peak memory is the gradients plus one chunk, for any number of tokens.

    Args:
        hidden: (..., D), in any floating dtype.
        weight: (V, D); it may be tied to an embedding, frozen, or used elsewhere, too. With a DTensor whose rows are
            split over a group of ranks, and ``hidden`` a DTensor that all of them have, each computes the logits of
            its own classes, and only values per token are reduced over the group: the logits are never gathered.
        targets: (...), integers below V or ``ignore_index``.
        bias: (V,).
        ignore_index: label of targets that are excluded from the loss and its mean.
        class_weights: w, (V,), without gradient, as the ``weight`` of ``F.cross_entropy``.
        label_smoothing: ε, from 0 to 1.
        reduction: ``"mean"`` over the counted targets (with class weights the sum divided by that of their weights),
            ``"sum"``, or ``"none"`` for one loss per token, (...).
        z_loss: ζ, the weight of the squared log-partition, which keeps logits from drifting; PaLM's is 1e-4.
        softcap: c, the largest absolute logit; 30 in Gemma 2.
        chunk: number of tokens whose logits are in memory at once. By default an eighth of them, or if that is below
            2,048 a quarter, and at most 4,096, or as many as fit in 512 MiB.
        backend: ``"chunked"`` is our implementation, and so is ``"auto"``, because the others have limitations:
            ``"compiled"`` is the same with the operations between its matrix products compiled by ``torch.compile``,
            which takes time once and needs a compiler; ``"liger"`` is Liger's Triton kernel (CUDA, extra ``liger``),
            which makes the host wait for the device at each call and whose graph supports one backward; ``"torch"`` is
            ``torch.nn.functional.linear_cross_entropy`` (torch 2.13), which rounds the loss of bfloat16 inputs more
            coarsely than the plain path, and whose gradients are NaN without counted targets.
            ``examples/chunked_loss.py`` measures them.

    Returns:
        The loss: float32, or float64 for float64 inputs; a scalar, or (...) for ``reduction="none"``.

    Raises:
        ValueError: shapes or arguments that do not match, or that the backend does not support; targets on the CPU that
            are no class.
        RuntimeError: a second derivative is requested (in the backward), or a forward-mode one, or ``torch.func``'s.
        ModuleNotFoundError: ``backend="liger"`` without the package.
        MiscompiledError: ``backend="compiled"``, whose first results are compared with those of eager code.

    Example:
        >>> hidden, weight = torch.randn(2, 5, 4), torch.randn(9, 4)
        >>> targets = torch.randint(9, (2, 5))
        >>> loss = linear_cross_entropy(hidden, weight, targets)
        >>> plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
        >>> torch.allclose(loss, plain)
        True

    Source:
        Gradients in the forward: Liger Kernel, https://arxiv.org/abs/2410.10989. Label smoothing: Szegedy et al. 2016,
        https://arxiv.org/abs/1512.00567. z-loss: PaLM, https://arxiv.org/abs/2204.02311. Soft-capping: Gemma 2,
        https://arxiv.org/abs/2408.00118. Checked against ``F.cross_entropy`` of the logits in float64, and each
        backend in float32.
    """
    _check(hidden, weight, targets, bias, class_weights)
    refuse_transforms(_NAME, _WAY_OUT, hidden, weight, bias)
    _refuse_unknown_classes(targets, weight, ignore_index)
    shard = None
    if isinstance(hidden, DTensor) or isinstance(weight, DTensor):
        _refuse_split(hidden, weight, backend)
        shard, hidden, weight, bias = _take_shard(hidden, weight, bias)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    one_of("backend", backend, BACKENDS)
    shape, low = targets.shape, autocast_dtype(hidden.device)
    # In 64 bits, which gather expects, and in which -100 is not 156.
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    # A custom function would compute gradients that are not used.
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    kept = _counted_positions(targets, ignore_index)
    if kept is not None:
        hidden, targets = hidden[kept], targets[kept]
    classes = len(weight) if shard is None else shard.largest
    size = chunk or chunk_size(len(hidden), classes * (low or hidden.dtype).itemsize)
    options = (label_smoothing, z_loss, softcap)
    if backend in ("auto", "chunked", "compiled"):
        prepare = functools.partial(_prepare, size, options, backend == "compiled", shard)
        counted = targets != ignore_index
        # gather expects valid classes; the losses of these targets are set to 0 in the end
        targets = torch.where(counted, targets, 0)
        chunked = ChunkedLoss(_NAME, _WAY_OUT, prepare, reduction, size, low)
        if class_weights is not None:
            class_weights = class_weights.to(at_least_float32(hidden))
            chunked = dataclasses.replace(chunked, divisor=_sum_class_weights)
        loss = chunked(hidden, weight, bias, counted, targets, class_weights)
    elif chunk is not None or class_weights is not None:
        what = f"{chunk=}" if class_weights is None else "class_weights"
        why = "this backend chooses its own chunk size, and has no class weights here"
        raise ValueError(explain(f"{what} with {backend=}", why, "Use backend='chunked'"))
    else:
        if low is not None:
            hidden, weight, bias = hidden.to(low), weight.to(low), cast(bias, low)
        run = _run_liger if backend == "liger" else _run_torch
        loss = run(hidden, weight, bias, targets, ignore_index, reduction, *options)
        if loss.requires_grad and not torch.compiler.is_compiling():
            # Both would silently omit it, as a custom function does.
            loss.register_hook(lambda gradient: refuse_second_derivative(_NAME, _WAY_OUT))
    if reduction != "none":
        return loss
    return loss.reshape(shape) if kept is None else loss.new_zeros(shape.numel()).index_copy(0, kept, loss).view(shape)


def _is_on_host(targets: Tensor) -> bool:
    """Whether values can be looked at without a wait for a device."""
    # No subclass: a fake tensor has no values.
    return type(targets) is Tensor and targets.device.type == "cpu" and not torch.compiler.is_compiling()


def _counted_positions(targets: Tensor, ignore_index: int) -> Tensor | None:
    """Return where targets count, so that others need no logits; None if all do, or if checking would synchronize."""
    if not _is_on_host(targets):
        return None
    kept = (targets != ignore_index).nonzero()[:, 0]
    if len(kept) == len(targets):
        return None
    return kept


def _refuse_unknown_classes(targets: Tensor, weight: Tensor, ignore_index: int) -> None:
    if not _is_on_host(targets):
        return
    counted = targets[targets != ignore_index]
    for target in map(int, counted.aminmax() if counted.numel() else ()):
        if not 0 <= target < len(weight):
            why = f"weight has {len(weight):,} rows, one for each class from 0"
            way_out = f"Give it a row for each token of the tokenizer, or leave the position out with {ignore_index}"
            raise ValueError(explain(f"a target of {target}", why, way_out))


def _sum_class_weights(losses: Tensor, counted: Tensor, targets: Tensor, class_weights: Tensor) -> Tensor:
    return torch.where(counted, class_weights[targets], 0.0).sum()


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weights: Tensor | None) -> None:
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        what = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
        why = "expected (..., D), (V, D) and (...)"
        raise ValueError(explain(what, why, "Check whether one of them is transposed or shifted"))
    for name, given in (("bias", bias), ("class_weights", class_weights)):
        if given is not None and given.shape != weight.shape[:1]:
            why = "expected one value per class"
            raise ValueError(explain(f"{name} {tuple(given.shape)}", why, f"Give {tuple(weight.shape[:1])}"))
    if class_weights is not None and class_weights.requires_grad:
        why = "they have no gradient here, nor in F.cross_entropy"
        raise ValueError(explain("class_weights that require a gradient", why, "Pass class_weights.detach()"))
    if targets.is_floating_point() or targets.dtype is torch.bool:
        raise ValueError(explain(f"targets of {targets.dtype}", "expected class indices", "Convert them with .long()"))


def _refuse_split(hidden: Tensor, weight: Tensor, backend: str) -> None:
    """Refuse DTensors of other layouts, such as the shards of FSDP2, whose ranks have different tokens."""
    same = isinstance(hidden, DTensor) and isinstance(weight, DTensor) and hidden.device_mesh == weight.device_mesh
    if not (same and is_split_by_rows(weight)):
        kinds = f"hidden of {type(hidden).__name__} and weight of {type(weight).__name__}"
        why = "a weight is split by rows over a mesh of one dimension, on all of whose ranks hidden is the same"
        way_out = "Gather the weight, or give DTensor.from_local(hidden, weight.device_mesh, [Replicate()])"
        raise ValueError(explain(f"{_NAME} with {kinds}", why, way_out))
    if backend not in ("auto", "chunked"):
        why = "its ranks reduce values in the middle of the loss, which only our implementation does"
        raise ValueError(explain(f"{backend=} with a vocabulary that is split", why, "Use backend='chunked'"))


def _take_shard(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[VocabularyShard, Tensor, Tensor, Tensor | None]:
    """Return the classes of this rank, with the plain tensors that it computes with."""
    assert isinstance(hidden, DTensor)
    assert isinstance(weight, DTensor)
    shard = VocabularyShard.of(weight)
    if bias is not None:
        bias = shard.take(share_of_gradient(on_all_ranks(bias, weight.device_mesh)))
    return shard, share_of_gradient(hidden), weight.to_local(), bias


def _prepare(
    size: int,
    options: Options,
    compiled: bool,
    shard: VocabularyShard | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counted: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
) -> OfChunk:
    # All chunks share it: on a CPU, allocating new memory for each takes a third of the product's time.
    buffer = hidden.new_empty(min(size, len(targets)), len(weight))

    def of_chunk(part: slice, share: Tensor | None, with_gradient: bool) -> tuple[Tensor, Tensor]:
        rows = hidden[part]
        # The argument out= works without gradients only, as in custom functions.
        logits = buffer[: len(rows)]
        if bias is None:
            torch.mm(rows, weight.T, out=logits)
        else:
            torch.addmm(bias, rows, weight.T, out=logits)
        losses = use_logits(logits, targets[part], options, compiled, share, with_gradient, class_weights, shard)
        return losses, logits  # whose memory now holds their gradient

    return of_chunk


def _run_liger(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    runs = hidden.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter is for tests
    if not runs or reduction == "none" or hidden.dtype not in (torch.float32, torch.bfloat16):
        what = f"backend='liger' on {hidden.device.type}, {hidden.dtype}, {reduction=}"
        why = "Liger's kernel is for CUDA, float32 and bfloat16, 'mean' and 'sum'"
        raise ValueError(explain(what, why, "Use backend='chunked'"))
    liger = require("liger_kernel.transformers.fused_linear_cross_entropy", extra="liger")
    kernel = liger.LigerFusedLinearCrossEntropyLoss(
        ignore_index=ignore_index,
        lse_square_scale=z_loss,
        label_smoothing=smoothing,
        # Liger's mean of nothing is 0, and it scales gradients before their sum.
        reduction="sum",
        softcap=softcap,
        accum_dtype=torch.float32,
    )
    # Liger asks only the hidden states whether gradients are required.
    if weight.requires_grad and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    total = kernel(weight, hidden, targets, bias)
    if reduction == "mean":
        return total / (targets != ignore_index).sum()
    return total


def _run_torch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    if not hasattr(F, "linear_cross_entropy") or z_loss or smoothing or softcap is not None:
        what = f"backend='torch' with torch {torch.__version__}, {z_loss=}, label_smoothing={smoothing}, {softcap=}"
        why = "torch has this function from 2.13 on, and chunks it only without z-loss, smoothing and softcap"
        raise ValueError(explain(what, why, "Use backend='chunked'"))
    # By default a second backward raises, with retain_graph=True as well; ours allows it.
    chunked = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    return F.linear_cross_entropy(
        hidden, weight, targets, linear_bias=bias, options=chunked, ignore_index=ignore_index, reduction=reduction
    )
