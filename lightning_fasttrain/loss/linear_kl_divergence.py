"""KL divergence between a student's and a teacher's predictions, with the logits of a few tokens at a time."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, check_arguments, one_of, positive_int
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.recomputation import refuse_transforms
from lightning_fasttrain.loss.chunked import ChunkedLoss, OfChunk, at_least_float32, autocast_dtype, cast, chunk_size

_NAME = "linear_kl_divergence or kl_divergence"
_WAY_OUT = "Use F.kl_div of both models' log-softmax instead, which has all derivatives"


class LogitsOf(NamedTuple):
    """The factors of logits :math:`c \\tanh((W h + b) / c)`; without W, h are the logits themselves."""

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    dtype: torch.dtype | None = None  # dtype of the product, outside of autocast

    @property
    def classes(self) -> int:
        if self.weight is None:
            return self.hidden.shape[-1]
        return self.weight.shape[0]

    def rows(self, part: slice) -> Tensor:
        """Return the logits of some tokens, in float32 at least; they may share the caller's memory."""
        logits = self.hidden[part]
        if self.weight is not None:
            logits = F.linear(logits, self.weight, self.bias)
        logits = logits.to(at_least_float32(logits))
        if self.softcap is None:
            return logits
        # The division creates a new tensor, so tanh_ never writes into the caller's logits.
        return torch.tanh_(logits / self.softcap).mul_(self.softcap)

    def cast(self) -> "LogitsOf":
        """Cast the factors as autocast would for ``F.linear``; a custom function has no autocast in its backward."""
        dtype = autocast_dtype(self.hidden.device) or self.dtype
        if self.weight is None or dtype is None:
            return self
        return self._replace(hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=cast(self.bias, dtype))

    def flatten(self) -> "LogitsOf":
        return self._replace(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))

    def detach(self) -> "LogitsOf":
        weight = None if self.weight is None else self.weight.detach()
        bias = None if self.bias is None else self.bias.detach()
        return self._replace(hidden=self.hidden.detach(), weight=weight, bias=bias)


@check_arguments
def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    temperature: PositiveFloat = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    chunk: PositiveInt | None = None,
) -> Tensor:
    r"""Compute :math:`T^2 \, \mathrm{KL}(p \Vert q)` of a teacher's p and a student's q, without storing their logits.

    With logits :math:`z = c \tanh((W h + b) / c)` (:math:`c` = ``softcap``; none by default), :math:`q =
    \mathrm{softmax}(z / T)` and p likewise. The factor T² keeps the size of gradients independent of T.

    Both logits are computed for ``chunk`` tokens at a time and used at once: for ``"mean"`` and ``"sum"`` the gradients
    are computed with them in the forward, so nothing is computed twice; for ``"none"`` they are recomputed in the
    backward. Peak memory is the gradients plus a few chunks, for any number of tokens.

    Args:
        hidden: the student's hidden states (..., D), in any floating dtype.
        weight: (V, D); it may be tied to an embedding, frozen, or used elsewhere, too.
        teacher_hidden: (..., E); the teacher's width may differ.
        teacher_weight: (V, E). The teacher's tensors get no gradients.
        bias: (V,).
        teacher_bias: (V,).
        softcap: largest absolute logit, as in Gemma 2.
        teacher_softcap: the same for the teacher.
        temperature: T; the higher it is, the larger the influence of the teacher's small probabilities.
        mask: (...), the tokens counted in the loss and in its mean, such as ``labels != -100``. By default all.
        reduction: ``"mean"`` over the counted tokens, ``"sum"``, or ``"none"`` for one value per token, (...).
        chunk: number of tokens whose logits are in memory at once. By default a 32nd of them, in multiples of 128, and
            at most 4,096.
    Returns:
        The loss: float32, or float64 for float64 inputs; a scalar, or (...) for ``reduction="none"``.

    Raises:
        ValueError: shapes or arguments that do not match.
        RuntimeError: a second derivative is requested (in the backward), or a forward-mode one, or ``torch.func``'s.

    Example:
        >>> hidden, weight, theirs, head = torch.randn(5, 4), torch.randn(9, 4), torch.randn(5, 6), torch.randn(9, 6)
        >>> loss = linear_kl_divergence(hidden, weight, theirs, head, temperature=2.0)
        >>> q, p = (hidden @ weight.T / 2).log_softmax(-1), (theirs @ head.T / 2).log_softmax(-1)
        >>> torch.allclose(loss, 4 * F.kl_div(q, p, log_target=True, reduction="batchmean"))
        True

    Source:
        Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", https://arxiv.org/abs/1503.02531. Gradients
        in the forward: Liger Kernel, https://arxiv.org/abs/2410.10989. Checked against ``F.kl_div`` of both logits.
    """
    student = LogitsOf(hidden, weight, bias, softcap)
    teacher = LogitsOf(teacher_hidden, teacher_weight, teacher_bias, teacher_softcap)
    return divergence(student, teacher, temperature=temperature, mask=mask, reduction=reduction, chunk=chunk)


@check_arguments
def kl_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: PositiveFloat = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    chunk: PositiveInt | None = None,
) -> Tensor:
    """Compute :func:`linear_kl_divergence` of existing logits, without complete float32 copies and probabilities.

    Args:
        logits: the student's, (..., V).
        teacher_logits: (..., V); they get no gradient.
        temperature: as for :func:`linear_kl_divergence`.
        mask: as for :func:`linear_kl_divergence`.
        reduction: as for :func:`linear_kl_divergence`.
        chunk: number of tokens at once. By default a 32nd of them, in multiples of 128, and at most 4,096.

    Returns:
        As for :func:`linear_kl_divergence`.

    Raises:
        ValueError: shapes or arguments that do not match.

    Example:
        >>> kl_divergence(torch.zeros(2, 3), torch.zeros(2, 3))
        tensor(0.)
    """
    student, teacher = LogitsOf(logits), LogitsOf(teacher_logits)
    return divergence(student, teacher, temperature=temperature, mask=mask, reduction=reduction, chunk=chunk)


def divergence(
    student: LogitsOf,
    teacher: LogitsOf,
    *,
    temperature: float,
    mask: Tensor | None = None,
    reduction: str = "mean",
    chunk: PositiveInt | None = None,
) -> Tensor:
    """Compute the divergence of any two kinds of logits."""
    one_of("reduction", reduction, ("mean", "sum", "none"))
    _check(student, teacher, temperature, mask)
    refuse_transforms(_NAME, _WAY_OUT, *student[:3], *teacher[:3])
    shape = student.hidden.shape[:-1]
    student, teacher = student.cast().flatten(), teacher.detach().cast().flatten()
    # A custom function would compute gradients that are not used.
    if not torch.is_grad_enabled():
        student = student.detach()
    # Logits of two models and their intermediate values take several times the memory of one model's loss.
    row_bytes = student.classes * student.hidden.element_size()
    size = chunk_size(len(student.hidden), row_bytes, share=32, enough=128)
    if chunk is not None:
        size = positive_int("chunk", chunk)
    counted = None
    if mask is not None:
        counted = mask.reshape(-1) != 0
    prepare = functools.partial(_prepare, student.softcap, teacher.softcap, float(temperature))
    loss = ChunkedLoss(_NAME, _WAY_OUT, prepare, reduction, size)(*student[:3], counted, *teacher[:3])
    if reduction == "none":
        return loss.reshape(shape)
    return loss


def refuse_other_classes(student: int, teacher: int) -> None:
    """Refuse a student and a teacher with different numbers of classes."""
    if student != teacher:
        what = f"the student has {student} classes, the teacher {teacher}"
        way_out = "Use the same vocabulary; if only its padding differs, call resize_token_embeddings"
        raise ValueError(explain(what, "their probabilities are compared class by class", way_out))


def _check(student: LogitsOf, teacher: LogitsOf, temperature: float, mask: Tensor | None) -> None:
    for whose, one in (("student", student), ("teacher", teacher)):
        if one.weight is not None and (one.weight.ndim != 2 or one.hidden.shape[-1] != one.weight.shape[1]):
            what = f"{whose}: hidden {tuple(one.hidden.shape)}, weight {tuple(one.weight.shape)}"
            raise ValueError(explain(what, "expected (..., D) and (V, D)", "Check whether one of them is transposed"))
        if one.bias is not None and one.bias.shape != (one.classes,):
            why = "expected one value per class"
            raise ValueError(explain(f"{whose}: bias {tuple(one.bias.shape)}", why, f"Give ({one.classes},)"))
        if one.softcap is not None and not 0 < one.softcap < math.inf:
            why = "it bounds the magnitude of logits"
            raise ValueError(explain(f"{whose}: softcap={one.softcap}", why, "Use a positive number"))
    refuse_other_classes(student.classes, teacher.classes)
    shape = student.hidden.shape[:-1]
    if teacher.hidden.shape[:-1] != shape:
        what = f"{tuple(shape)} tokens of the student, {tuple(teacher.hidden.shape[:-1])} of the teacher"
        raise ValueError(explain(what, "they are compared token by token", "Run both on the same inputs"))
    if mask is not None and (mask.shape != shape or mask.is_floating_point()):
        why = "expected one boolean per token"
        way_out = "Give booleans of that shape, such as labels != -100"
        raise ValueError(explain(f"mask {tuple(mask.shape)} of {mask.dtype} for {tuple(shape)} tokens", why, way_out))


def _prepare(
    softcap: float | None,
    teacher_softcap: float | None,
    temperature: float,
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    counted: Tensor | None,
    their_hidden: Tensor,
    their_weight: Tensor | None,
    their_bias: Tensor | None,
) -> OfChunk:
    student = LogitsOf(hidden, weight, bias, softcap)
    teacher = LogitsOf(their_hidden, their_weight, their_bias, teacher_softcap)

    def of_chunk(part: slice, share: Tensor | None, with_gradient: bool) -> tuple[Tensor, Tensor]:
        losses, d_logits = _loss_of(student, teacher, part, temperature, with_gradient)
        if share is not None:
            d_logits.mul_(share[:, None])
        if counted is not None and with_gradient:
            # Not left to a factor of 0: such tokens may hold NaN.
            d_logits.masked_fill_(~counted[part, None], 0)
        return losses, d_logits

    return of_chunk


def _loss_of(
    student: LogitsOf,
    teacher: LogitsOf,
    part: slice,
    temperature: float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token of a chunk, and its gradient by the student's ``hidden @ weight.T + bias``."""
    logits = student.rows(part)
    slope = None
    if student.softcap is not None and with_gradient:  # of z = c · tanh(x / c): dz / dx = 1 − (z / c)²
        slope = torch.sub(1, (logits / student.softcap).square_())
    log_q = torch.log_softmax(logits / temperature, dim=1)
    del logits  # free float32 (tokens, V) before computing the teacher's
    log_p = torch.log_softmax(teacher.rows(part) / temperature, dim=1).to(log_q.dtype)
    p = log_p.exp()
    losses = log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0).sum(dim=1).mul_(temperature**2)  # 0 · log 0 = 0
    if not with_gradient:
        return losses, losses
    # The gradient of T² KL by the student's logits is T² (q − p) / T. It replaces log q, which the loss no longer
    # needs.
    gradient = log_q.exp_().sub_(p).mul_(temperature)
    if slope is not None:
        gradient.mul_(slope)
    return losses, gradient
