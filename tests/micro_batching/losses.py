"""Losses with one normalizer: those of ``torch.nn.functional``.

Names in the rows: b a batch, z the outputs of the model, e the loss of each entry, m a mask, w weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.micro_batching.loss_models import (
    CLASSES,
    LENGTH,
    POINT,
    RARE,
    VOCAB,
    Draw,
    LossCase,
    PointNet,
    TokenNet,
    Training,
    binary,
    classes,
    images,
    kept,
    labelled,
    masked,
    normal,
    of_tokens,
    points,
    positives,
    probabilities,
    signs,
    task,
    token_ids,
    tokens,
    uniform,
    weights,
)


class Sentences(NamedTuple):
    ids: Tensor
    y: Tensor


@dataclass
class Example:
    ids: Tensor
    y: Tensor


@dataclass
class Output:
    loss: Tensor


def cross_entropy(**settings: Any) -> Callable[[int], Training]:
    """A classifier with optional class weights of ``nn.CrossEntropyLoss``."""
    if "weight" in settings:
        return points(lambda z, b: F.cross_entropy(z, b["y"], **{**settings, "weight": RARE.to(z)}), y=classes())
    return points(lambda z, b: F.cross_entropy(z, b["y"], **settings), y=classes())


def partly_labelled(ignored: int, **settings: Any) -> Callable[[int], Training]:
    """A classifier with some unlabeled samples."""

    def loss(z: Tensor, b: Any) -> Tensor:
        weight = RARE.to(z) if "weight" in settings else None
        return F.cross_entropy(z, b["labels"], ignore_index=ignored, **{**settings, "weight": weight})

    return points(loss, labels=labelled(ignored))


def words(ignored: int, name: str, form: Callable[[dict[str, Any]], Any] = dict, **settings: Any) -> Any:
    """A language model with labels under ``name`` in a dict, or where ``form`` puts them."""

    def step(net: nn.Module, b: Any) -> Tensor:
        fields = vars(b) if isinstance(b, Example) else b
        ids, y = fields.values() if isinstance(fields, dict) else fields
        return of_tokens(net(ids), y, ignore_index=ignored, **settings)

    return task(TokenNet, step, form, ids=token_ids, **{name: labelled(ignored, VOCAB, LENGTH)})


def next_token(z: Tensor, b: Any, **settings: Any) -> Tensor:
    return of_tokens(z[:, :-1], b["labels"][:, 1:], **settings)


def regression(loss: Callable[..., Tensor], target: Draw | None = None, **settings: Any) -> Callable[[int], Training]:
    return points(lambda z, b: loss(z, b["y"], **settings), y=target or normal(CLASSES))


def speech(own: Callable[[Tensor, Tensor], Tensor] | None = None, **settings: Any) -> Callable[[int], Training]:
    """CTC on 9 frames per sample and 1 to 3 labels."""

    def step(net: nn.Module, b: Any) -> Tensor:
        z = net(b["x"]).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(z, b["y"], torch.full((len(b["x"]),), 9), b["lengths"], **settings)
        return own(loss, b["lengths"]) if own else loss

    lengths = lambda g, number, size: 1 + kept(2)(g, number, size).sum(1)  # noqa: E731
    labels = lambda g, number, size: torch.randint(1, CLASSES, (size, 3), generator=g)  # noqa: E731
    return task(PointNet, step, x=normal(9, POINT), y=labels, lengths=lengths)


class Annealed(nn.Module):
    """Holds a factor that the user's loop changes after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PointNet()
        self.factor = 0.1


def annealed(seed: int) -> Training:
    def step(net: Any, b: Any) -> Tensor:
        z = net.net(b["x"])
        return F.cross_entropy(z, b["y"]) + net.factor * z.square().mean()

    training = task(Annealed, step, x=normal(POINT), y=classes())(seed)
    training.after_step = lambda: setattr(training.module, "factor", 2 * training.module.factor)
    return training


def scaled(z: Tensor, b: Any) -> Tensor:
    return b["scale"] * F.cross_entropy(z, b["y"])


def scale_of_step(g: Any, number: int, size: int) -> Any:
    return 0.5 + number


LOSSES = [
    # Cross-entropy and its settings.
    LossCase("cross_entropy", cross_entropy()),
    LossCase("cross_entropy, sum", cross_entropy(reduction="sum")),
    LossCase("cross_entropy, none, own mean", masked(lambda e, m: e.mean())),
    LossCase("cross_entropy, none, own sum", masked(lambda e, m: e.sum())),
    LossCase("class weights", cross_entropy(weight=RARE)),
    LossCase("class weights, sum", cross_entropy(weight=RARE, reduction="sum")),
    LossCase("class weights, label smoothing", cross_entropy(weight=RARE, label_smoothing=0.1)),
    LossCase("label smoothing", cross_entropy(label_smoothing=0.1)),
    LossCase("label smoothing, sum", cross_entropy(label_smoothing=0.1, reduction="sum")),
    LossCase("label smoothing, unlabelled samples", partly_labelled(-100, label_smoothing=0.1)),
    LossCase("label smoothing, class weights, unlabelled", partly_labelled(-1, label_smoothing=0.1, weight=RARE)),
    LossCase("class weights, unlabelled samples", partly_labelled(-100, weight=RARE)),
    LossCase("unlabelled samples, sum", partly_labelled(-100, reduction="sum")),
    LossCase(
        "class weights, none, own mean",
        points(lambda z, b: F.cross_entropy(z, b["y"], RARE.to(z), reduction="none").mean(), y=classes()),
    ),
    LossCase(
        "class weights, none, divided by weight[labels].sum()",
        points(
            lambda z, b: F.cross_entropy(z, b["y"], RARE.to(z), reduction="none").sum() / RARE.to(z)[b["y"]].sum(),
            y=classes(),
        ),
    ),
    LossCase("tokens (B, T)", words(-100, "labels")),
    LossCase("tokens, 0 is padding, dict 'target'", words(0, "target")),
    LossCase("tokens, 0 is padding, dict 'y'", words(0, "y")),
    LossCase("tokens, -1 is padding, tuple", words(-1, "y", lambda b: tuple(b.values()))),
    LossCase("tokens, 0 is padding, tuple", words(0, "y", lambda b: tuple(b.values()))),
    LossCase("tokens, -100, named tuple", words(-100, "y", lambda b: Sentences(**b))),
    LossCase("tokens, 255 is padding, dataclass", words(255, "y", lambda b: Example(**b))),
    LossCase("tokens, smoothed", words(-100, "target", label_smoothing=0.2)),
    LossCase("tokens, sum", words(-1, "labels", reduction="sum")),
    LossCase(
        "tokens (B, V, T), tied head",
        tokens(lambda z, b: F.cross_entropy(z.mT, b["y"]), tied=True, y=labelled(-100, VOCAB, LENGTH)),
    ),
    LossCase("next tokens", tokens(next_token, labels=labelled(-100, VOCAB, LENGTH))),
    LossCase(
        "next tokens, sum over all counted",
        tokens(
            lambda z, b: next_token(z, b, reduction="sum") / (b["labels"][:, 1:] != -100).sum().clamp(min=1),
            labels=labelled(-100, VOCAB, LENGTH),
        ),
    ),
    LossCase(
        "segmentation, 255",
        images(lambda z, b: F.cross_entropy(z, b["target"], ignore_index=255), target=labelled(255, CLASSES, 5, 5)),
    ),
    LossCase(
        "segmentation, class weights",
        images(lambda z, b: F.cross_entropy(z, b["y"], RARE.to(z), ignore_index=0), y=labelled(0, CLASSES, 5, 5)),
    ),
    LossCase("soft targets", regression(F.cross_entropy, probabilities(CLASSES))),
    LossCase("soft targets, smoothed", regression(F.cross_entropy, probabilities(CLASSES), label_smoothing=0.1)),
    LossCase(
        "soft targets, class weights",
        points(lambda z, b: F.cross_entropy(z, b["y"], RARE.to(z)), y=probabilities(CLASSES)),
    ),
    LossCase(
        "nll_loss of log_softmax",
        points(lambda z, b: F.nll_loss(z.log_softmax(-1), b["y"], RARE.to(z), ignore_index=-1), y=labelled(-1)),
    ),
    LossCase(
        "log-softmax and gather by hand, y != 0",
        tokens(
            lambda z, b: (
                -(z.log_softmax(-1).gather(2, b["y"][..., None]).squeeze(2) * (b["y"] != 0)).sum() / (b["y"] != 0).sum()
            ),
            y=labelled(0, VOCAB, LENGTH),
        ),
    ),
    LossCase("multi_margin", regression(F.multi_margin_loss, classes())),
    # Other losses of torch.nn.functional.
    LossCase("mse", regression(F.mse_loss)),
    LossCase("mse, sum", regression(F.mse_loss, reduction="sum")),
    LossCase("l1", regression(F.l1_loss)),
    LossCase("smooth_l1", regression(F.smooth_l1_loss, beta=0.5)),
    LossCase("huber", regression(F.huber_loss, delta=0.7)),
    LossCase("bce", points(lambda z, b: F.binary_cross_entropy(z.sigmoid(), b["y"]), y=positives(CLASSES))),
    LossCase(
        "bce, weights of entries",
        points(
            lambda z, b: F.binary_cross_entropy(z.sigmoid(), b["y"], b["w"]), y=positives(CLASSES), w=weights(CLASSES)
        ),
    ),
    LossCase(
        "bce_with_logits, pos_weight",
        points(lambda z, b: F.binary_cross_entropy_with_logits(z, b["y"], pos_weight=RARE.to(z)), y=positives(CLASSES)),
    ),
    LossCase(
        "bce_with_logits, mean per class, then sum", points(lambda z, b: binary(z, b).mean(0).sum(), y=positives(4))
    ),
    LossCase(
        "kl_div, batchmean",
        points(lambda z, b: F.kl_div(z.log_softmax(-1), b["y"], reduction="batchmean"), y=probabilities(CLASSES)),
    ),
    LossCase(
        "kl_div, mean over entries",
        points(lambda z, b: F.kl_div(z.log_softmax(-1), b["y"], reduction="none").mean(), y=probabilities(CLASSES)),
    ),
    LossCase(
        "kl_div, sum / len(x)",
        points(
            lambda z, b: F.kl_div(z.log_softmax(-1), b["y"], reduction="sum") / len(b["x"]), y=probabilities(CLASSES)
        ),
    ),
    LossCase("gaussian_nll", points(lambda z, b: F.gaussian_nll_loss(z[:, :2], b["y"], z[:, 2:].exp()), y=normal(2))),
    LossCase("poisson_nll", regression(F.poisson_nll_loss, uniform(CLASSES))),
    LossCase(
        "cosine_embedding", points(lambda z, b: F.cosine_embedding_loss(z[:, :2], z[:, 2:], b["y"], 0.1), y=signs())
    ),
    LossCase("margin_ranking", points(lambda z, b: F.margin_ranking_loss(z[:, 0], z[:, 1], b["y"], 0.3), y=signs())),
    LossCase(
        "triplet_margin",
        task(
            PointNet,
            lambda net, b: F.triplet_margin_loss(net(b["a"]), net(b["p"]), net(b["n"])),
            a=normal(POINT),
            p=normal(POINT),
            n=normal(POINT),
        ),
    ),
    LossCase("hinge_embedding", regression(F.hinge_embedding_loss, signs(CLASSES))),
    LossCase("soft_margin", regression(F.soft_margin_loss, signs(CLASSES))),
    LossCase("multilabel_soft_margin", regression(F.multilabel_soft_margin_loss, positives(CLASSES))),
    LossCase("multilabel_margin", regression(F.multilabel_margin_loss, labelled(-1, CLASSES, CLASSES))),
    LossCase("ctc", speech()),
    LossCase("ctc, sum", speech(reduction="sum")),
    LossCase("ctc, sum / sum of lengths", speech(lambda e, n: e.sum() / n.sum(), reduction="none")),
    # What a step returns, and what else is in a batch.
    LossCase("in a dict", masked(lambda e, m: {"loss": (e * m).sum() / m.sum(), "shown": e.detach()})),
    LossCase("in an object", masked(lambda e, m: Output((e * m).sum() / m.sum()))),
    LossCase("shape (1,)", masked(lambda e, m: (e * m).sum().view(1) / m.sum())),
    LossCase("a factor in the batch", points(scaled, y=classes(), scale=scale_of_step)),
    LossCase(
        "a factor in the batch, as a tensor",
        points(scaled, y=classes(), scale=lambda *how: torch.tensor(scale_of_step(*how))),
    ),
    LossCase("a factor that changes after each step", annealed),
]
