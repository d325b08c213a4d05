"""Losses with several normalizers, with one that does not add up, or with one that depends on the model."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.micro_batching.loss_models import (
    CLASSES,
    LENGTH,
    POINT,
    VOCAB,
    Heads,
    LossCase,
    PointNet,
    Training,
    classes,
    each_token,
    kept,
    labelled,
    masked,
    normal,
    of_tokens,
    points,
    positives,
    task,
    tokens,
    weighted,
)


def multi_task(count: int, join: Callable[[list[Tensor]], Tensor]) -> Callable[[int], Training]:
    """Heads whose labels are missing in different samples; ``join`` gets the loss of each head."""

    def step(net: nn.Module, b: Any) -> Tensor:
        return join([F.cross_entropy(z, b[f"y{i}"], ignore_index=-1) for i, z in enumerate(net(b["x"]))])

    fields: dict[str, Any] = {f"y{i}": labelled(-1, other=i % 2 == 1) for i in range(count)}
    return task(lambda: Heads(count), step, x=normal(POINT), **fields)


def span(z: Tensor, b: Any) -> Tensor:
    """Start and end of an answer; positions beyond the text (B, T) are clamped and ignored, as Hugging Face does."""
    length = z.shape[1]
    start, end = (b[name].clamp(0, length) for name in ("start", "end"))
    losses = [F.cross_entropy(z[..., i], at, ignore_index=length) for i, at in enumerate((start, end))]
    return (losses[0] + losses[1]) / 2


def masked_words_and_order(z: Tensor, b: Any) -> Tensor:
    """Masked language modelling and, from the first token, next-sentence prediction."""
    return of_tokens(z, b["labels"]) + F.cross_entropy(z[:, 0, :2], b["follows"])


def boxes(z: Tensor, b: Any) -> Tensor:
    """Six outputs per sample: the logits of two classes of an anchor and its box, which counts if there is one."""
    has_box = b["box_at"]
    of_class = F.cross_entropy(z[:, :2], has_box.long(), torch.tensor([0.1, 1.0]).to(z))
    of_box = F.l1_loss(z[:, 2:], b["box"], reduction="none").sum(1)
    return of_class + 5 * (of_box * has_box).sum() / has_box.sum().clamp(min=1)


def mean_per_task(z: Tensor, b: Any) -> Tensor:
    """Multi-label with missing labels: a mean over labeled entries for each task (column), then over tasks."""
    e = F.binary_cross_entropy_with_logits(z, b["y"], reduction="none")
    return ((e * b["known"]).sum(0) / b["known"].sum(0).clamp(min=1)).mean()


def mean_per_class(z: Tensor, b: Any) -> Tensor:
    e = F.cross_entropy(z, b["y"], reduction="none")
    counts = b["y"].bincount(minlength=CLASSES)
    sums = z.new_zeros(CLASSES).index_add(0, b["y"], e)
    return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum()


def half_positive_half_negative(z: Tensor, b: Any) -> Tensor:
    e, positive = F.binary_cross_entropy_with_logits(z, b["y"], reduction="none"), b["y"] > 0
    return 0.5 * e[positive].mean() + 0.5 * e[~positive].sum() / (~positive).sum().clamp(min=1)


def extra_term_if_positives(z: Tensor, b: Any) -> Tensor:
    loss = F.cross_entropy(z, b["y"])
    return loss + z[b["mask"]].square().mean() if b["mask"].any() else loss


def weights_by_frequency(z: Tensor, b: Any) -> Tensor:
    counts = b["y"].bincount(minlength=CLASSES)
    return F.cross_entropy(z, b["y"], len(z) / (CLASSES * counts.clamp(min=1)).to(z))


def twice_if_any_is_5(e: Tensor, y: Tensor) -> Tensor:
    return e.mean() * 2 if (y == 5).any() else e.mean()


def pseudo_labels(z: Tensor, b: Any) -> Tensor:
    p, y = z.detach().softmax(-1).max(-1)
    sure = p > 0.35
    return (F.cross_entropy(z, y, reduction="none") * sure).sum() / sure.sum().clamp(min=1)


def hardest(e: Tensor, share: float = 0.4) -> Tensor:
    return e.flatten().topk(max(1, int(share * e.numel()))).values.mean()


def trimmed_to_the_longest(z: Tensor, b: Any) -> Tensor:
    longest = int(b["mask"].sum(1).max())
    return (each_token(z, b["y"]) * b["mask"])[:, :longest].mean()


def policy_gradient(z: Tensor, b: Any) -> Tensor:
    advantage = (b["reward"] - b["reward"].mean()) / (b["reward"].std(correction=0) + 1e-8)
    return -(advantage * z.log_softmax(-1).gather(1, b["action"][:, None]).squeeze(1)).mean()


class DividesInside(torch.autograd.Function):
    """Cross-entropy whose graph hides its number of targets."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        counted = y != -1
        right = F.one_hot(y.clamp(min=0), z.shape[1])
        ctx.gradient = (z.softmax(-1) - right) * counted[:, None] / counted.sum().clamp(min=1)
        return F.cross_entropy(z, y, ignore_index=-1, reduction="sum") / counted.sum().clamp(min=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.gradient, None


class RunningNormalizer(nn.Module):
    """RetinaNet's normalizer: a running mean of the number of positives, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PointNet()
        self.register_buffer("positives", torch.tensor(10.0))

    def loss(self, b: Any) -> Tensor:
        self.positives.mul_(0.9).add_(0.1 * b["y"].sum().clamp(min=1))
        return F.binary_cross_entropy_with_logits(self.net(b["x"]), b["y"], reduction="sum") / self.positives


LOSSES_OF_COUNTS = [
    # Several normalizers.
    LossCase("two heads", multi_task(2, lambda losses: losses[0] + 0.5 * losses[1])),
    LossCase("three heads, sum / 3", multi_task(3, lambda losses: sum(losses, torch.zeros(())) / 3)),
    LossCase("four heads, stacked", multi_task(4, lambda losses: torch.stack(losses).mean())),
    LossCase("product of two heads", multi_task(2, lambda losses: losses[0] * losses[1])),
    LossCase("losses balanced by their own values", multi_task(2, lambda losses: sum(x / x.detach() for x in losses))),
    LossCase("the larger of two losses", multi_task(2, lambda losses: torch.stack(losses).max())),
    LossCase("span, positions clamped", tokens(span, start=labelled(99, LENGTH), end=labelled(99, LENGTH, other=True))),
    LossCase(
        "masked words and sentence order",
        tokens(masked_words_and_order, labels=labelled(-100, VOCAB, LENGTH), follows=classes(2)),
    ),
    LossCase("boxes", points(boxes, out=6, box=normal(4), box_at=kept(empty=True))),
    LossCase("mean per task, then over tasks", points(mean_per_task, y=positives(CLASSES), known=kept(CLASSES))),
    LossCase("mean per class, then over classes", points(mean_per_class, y=classes())),
    LossCase("half positives, half negatives", points(half_positive_half_negative, y=positives(CLASSES))),
    LossCase(
        "a term only where there are positives", points(extra_term_if_positives, y=classes(), mask=kept(empty=True))
    ),
    LossCase("labelled mean + mean over all", masked(lambda e, m: e[m].mean() + 0.1 * e.square().mean())),
    LossCase("masked mean * share of the mask", masked(lambda e, m: (e * m).sum() / m.sum() * m.to(e).mean())),
    LossCase("masked mean per position", masked(lambda e, m: ((e * m).sum(0) / m.sum(0).clamp(min=1)).mean())),
    # Normalizers that do not add up, or depend on the model.
    LossCase("sum / sqrt(n)", masked(lambda e, m: (e * m).sum() / m.to(e).sum().sqrt())),
    LossCase("sum / B ** 2", masked(lambda e, m: e.sum() / len(e) ** 2)),
    LossCase("mean * log(1 + B)", masked(lambda e, m: e.mean() * math.log(1 + len(e)))),
    LossCase("divided by the longest row", masked(lambda e, m: (e * m).sum() / m.sum(1).max())),
    LossCase("trimmed to the longest row", tokens(trimmed_to_the_longest, y=classes(VOCAB, LENGTH), mask=kept(LENGTH))),
    LossCase(
        "divided by the number of distinct labels",
        points(lambda z, b: F.cross_entropy(z, b["y"], reduction="sum") / b["y"].unique().numel(), y=classes()),
    ),
    LossCase("class weights by frequency", points(weights_by_frequency, y=classes())),
    LossCase(
        "twice if any label is 5",
        tokens(lambda z, b: twice_if_any_is_5(each_token(z, b["y"]), b["y"]), y=classes(VOCAB, LENGTH)),
    ),
    LossCase("pseudo-labels of confident samples", points(pseudo_labels)),
    LossCase("weights from the losses themselves", weighted(lambda e, w: (e.detach() / e.detach().sum() * e).sum())),
    LossCase("OHEM: the hardest 40%", masked(lambda e, m: hardest(e))),
    LossCase("the largest loss", masked(lambda e, m: e.mean(1).max())),
    LossCase("the median loss", weighted(lambda e, w: e.median())),
    LossCase("clipped at a quantile", masked(lambda e, m: e.clamp(max=e.detach().quantile(0.7)).mean())),
    LossCase("advantages of the batch", points(policy_gradient, reward=normal(), action=classes())),
    LossCase("own Function that divides inside", points(lambda z, b: DividesInside.apply(z, b["y"]), y=labelled(-1))),
    LossCase(
        "a running normalizer",
        task(RunningNormalizer, lambda net, b: net.loss(b), x=normal(POINT), y=positives(CLASSES)),
    ),
]
