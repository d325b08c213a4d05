"""Losses with one normalizer, written by hand in many ways.

Names in the rows: b a batch, z the outputs of the model, e the loss of each entry, m a mask, w weights.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.micro_batching.loss_models import (
    CLASSES,
    DIM,
    LENGTH,
    POINT,
    VOCAB,
    LossCase,
    PointNet,
    Training,
    binary,
    classes,
    each_token,
    images,
    labelled,
    masked,
    normal,
    points,
    positives,
    task,
    tokens,
    two_layers,
    uniform,
    weighted,
    with_gaps,
)


def mean_where_any(e: Tensor, m: Tensor) -> Tensor:
    n = m.sum()
    return torch.where(n > 0, (e * m).sum() / n.clamp(min=1), 0)


def mean_of_rows_with_any(e: Tensor, m: Tensor) -> Tensor:
    per_row = (e * m).sum(1) / m.sum(1).clamp(min=1)
    return per_row[m.any(1)].mean()


def mean_row_by_row(e: Tensor, m: Tensor) -> Tensor:
    means = [row[counted].mean() for row, counted in zip(e, m, strict=True) if counted.any()]
    return torch.stack(means).mean()


def focal(z: Tensor, y: Tensor, gamma: float = 2.0, alpha: float = 0.25) -> Tensor:
    p = z.sigmoid()
    right = p * y + (1 - p) * (1 - y)
    share = alpha * y + (1 - alpha) * (1 - y)
    return (share * (1 - right) ** gamma * F.binary_cross_entropy_with_logits(z, y, reduction="none")).sum()


def dice_of_each(z: Tensor, y: Tensor) -> Tensor:
    p = z.sigmoid()
    return 1 - (2 * (p * y).sum((1, 2, 3)) + 1) / ((p + y).sum((1, 2, 3)) + 1)


def gradient_penalty(net: nn.Module, b: Any) -> Tensor:
    x = b["x"].detach().requires_grad_()
    score = net(x).squeeze(1)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (score - b["y"]).square().mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = two_layers(POINT + 1)
        self.head = nn.Linear(DIM, POINT)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.head(self.backbone(torch.cat([x, t], 1)))


def denoising(weight_of: Callable[[Tensor], Tensor]) -> Callable[[int], Training]:
    """A diffusion model; noise and times come in the batch. ``weight_of`` gets the ratio of signal to noise (B,)."""

    def step(net: nn.Module, b: Any) -> Tensor:
        t = 0.01 + 0.98 * b["t"][:, None]
        noisy = (1 - t).sqrt() * b["x"] + t.sqrt() * b["noise"]
        missed = (net(noisy, t) - b["noise"]).square().mean(1)
        return (weight_of((1 - t) / t).squeeze(1) * missed).mean()

    return task(Denoiser, step, x=normal(POINT), noise=normal(POINT), t=uniform())


def distillation(temperature: float, share: float) -> Callable[[int], Training]:
    def loss(z: Tensor, b: Any) -> Tensor:
        soft = F.kl_div(
            F.log_softmax(z / temperature, -1), F.softmax(b["teacher"] / temperature, -1), reduction="batchmean"
        )
        return share * temperature**2 * soft + (1 - share) * F.cross_entropy(z, b["y"])

    return points(loss, y=classes(), teacher=normal(CLASSES))


LOSSES_OF_MASKS = [
    # Means over a mask, in all common formulations.
    LossCase("(e * m).sum() / m.sum()", masked(lambda e, m: (e * m).sum() / m.sum())),
    LossCase("m.sum().clamp(min=1)", masked(lambda e, m: (e * m).sum() / m.sum().clamp(min=1), empty=True)),
    LossCase("m.sum() + 1e-8", masked(lambda e, m: (e * m).sum() / (m.to(e).sum() + 1e-8), empty=True)),
    LossCase("m.sum() + 1", masked(lambda e, m: (e * m).sum() / (m.sum() + 1), empty=True)),
    LossCase("max(int(m.sum()), 1)", masked(lambda e, m: (e * m).sum() / max(int(m.sum()), 1), empty=True)),
    LossCase("m.sum().item()", masked(lambda e, m: (e * m).sum() / m.sum().item())),
    LossCase("nan_to_num", masked(lambda e, m: torch.nan_to_num((e * m).sum() / m.sum()))),
    LossCase("* (1 / m.sum())", masked(lambda e, m: (e * m).sum() * (1 / m.to(e).sum()))),
    LossCase("* m.sum().reciprocal()", masked(lambda e, m: (e * m).sum() * m.to(e).sum().reciprocal())),
    LossCase("torch.where(n > 0, ...)", masked(mean_where_any, empty=True)),
    LossCase("e[m].mean()", masked(lambda e, m: e[m].mean())),
    LossCase("e[m].mean() if m.any()", masked(lambda e, m: e[m].mean() if m.any() else 0 * e.sum(), empty=True)),
    LossCase("e[m].sum() / m.sum()", masked(lambda e, m: e[m].sum() / m.sum())),
    LossCase("masked_select", masked(lambda e, m: e.masked_select(m).mean())),
    LossCase("masked_fill", masked(lambda e, m: e.masked_fill(~m, 0).sum() / m.sum())),
    LossCase("nanmean", masked(lambda e, m: e.masked_fill(~m, torch.nan).nanmean())),
    LossCase("entries divided before the sum", masked(lambda e, m: (e * m / m.sum()).sum())),
    LossCase("einsum", masked(lambda e, m: torch.einsum("bt,bt->", e, m.to(e)) / m.sum())),
    LossCase("dot with a normalized mask", masked(lambda e, m: torch.dot(e.flatten(), (m / m.to(e).sum()).flatten()))),
    LossCase("(e * m).mean()", masked(lambda e, m: (e * m).mean())),
    LossCase("e.mean(1).mean(0)", masked(lambda e, m: e.mean(1).mean(0))),
    LossCase("e.mean(0).sum()", masked(lambda e, m: e.mean(0).sum())),
    LossCase("e.sum(1).mean()", masked(lambda e, m: e.sum(1).mean())),
    LossCase("mean per row, then over rows", masked(lambda e, m: ((e * m).sum(1) / m.sum(1).clamp(min=1)).mean())),
    LossCase("mean per row, over rows that have any", masked(mean_of_rows_with_any)),
    LossCase("mean per row in a loop", masked(mean_row_by_row)),
    LossCase("divided by rows that have any", masked(lambda e, m: (e * m).sum() / m.any(1).sum())),
    LossCase(
        "own mask y != 0",
        tokens(
            lambda z, b: (each_token(z, b["y"]) * (b["y"] != 0)).sum() / (b["y"] != 0).sum(),
            y=labelled(0, VOCAB, LENGTH),
        ),
    ),
    # Weights of samples.
    LossCase("(w * e).sum() / w.sum()", weighted(lambda e, w: (w * e).sum() / w.sum())),
    LossCase("(w * e).sum() / w.sum().clamp(min=1)", weighted(lambda e, w: (w * e).sum() / w.sum().clamp(min=1))),
    LossCase("torch.dot(w, e) / w.sum()", weighted(lambda e, w: torch.dot(w, e) / w.sum())),
    LossCase("(w / w.sum() * e).sum()", weighted(lambda e, w: (w / w.sum() * e).sum())),
    LossCase("(w / w.mean() * e).mean()", weighted(lambda e, w: (w / w.mean() * e).mean())),
    LossCase("(w.softmax(0) * e).sum()", weighted(lambda e, w: (w.softmax(0) * e).sum())),
    LossCase("(w * e).mean()", weighted(lambda e, w: (w * e).mean())),
    LossCase("(w * e).sum()", weighted(lambda e, w: (w * e).sum())),
    # Missing targets, and division by the number of positives.
    LossCase(
        "NaN-masked regression",
        points(lambda z, b: (z - b["y"])[~b["y"].isnan()].square().mean(), y=with_gaps(CLASSES)),
    ),
    LossCase(
        "NaN-masked regression by nan_to_num",
        points(
            lambda z, b: ((z - b["y"].nan_to_num()).abs() * ~b["y"].isnan()).sum() / (~b["y"].isnan()).sum(),
            y=with_gaps(CLASSES),
        ),
    ),
    LossCase("divided by the positives", points(lambda z, b: binary(z, b).sum() / b["y"].sum(), y=positives(4))),
    LossCase(
        "divided by the positives, clamped",
        points(lambda z, b: binary(z, b).sum() / b["y"].sum().clamp(min=1), y=positives(CLASSES, empty=True)),
    ),
    LossCase("focal, sum / positives", points(lambda z, b: focal(z, b["y"]) / b["y"].sum(), y=positives(CLASSES))),
    LossCase(
        "focal, sum / max(positives, 1)",
        points(lambda z, b: focal(z, b["y"]) / max(b["y"].sum().item(), 1.0), y=positives(CLASSES, empty=True)),
    ),
    LossCase("dice of each sample", images(lambda z, b: dice_of_each(z, b["y"]).mean(), out=1, y=positives(1, 5, 5))),
    # Constants and sizes.
    LossCase("sum / len(x)", masked(lambda e, m: e.sum() / len(e))),
    LossCase("sum / x.shape[0]", masked(lambda e, m: e.sum() / e.shape[0])),
    LossCase("sum / (B * T)", masked(lambda e, m: e.sum() / (e.shape[0] * e.shape[1]))),
    LossCase("sum / float(numel)", masked(lambda e, m: e.sum() / float(e.numel()))),
    LossCase("sum / 12, the size of the first batch", masked(lambda e, m: e.sum() / 12)),
    LossCase("sum / torch.tensor(12.0)", masked(lambda e, m: e.sum() / torch.tensor(12.0))),
    LossCase("mean * B", masked(lambda e, m: e.mean() * len(e))),
    LossCase("mean * B / 12", masked(lambda e, m: e.mean() * len(e) / 12)),
    LossCase("minus a mean", masked(lambda e, m: -(-e).mean())),
    LossCase("mean times log of the vocabulary", masked(lambda e, m: e.mean() / math.log(VOCAB))),
    # Several terms with one normalizer.
    LossCase("0.5 a + 0.3 b", masked(lambda e, m: 0.5 * e[m].mean() + 0.3 * e.square()[m].mean())),
    LossCase(
        "stack([a, b]).mean()", masked(lambda e, m: torch.stack([e[m].mean(), (e.sqrt() * m).sum() / m.sum()]).mean())
    ),
    LossCase("sum(a loss for each sample) / len", masked(lambda e, m: sum(row.mean() for row in e) / len(e))),
    LossCase("stack(a loss for each sample).mean()", masked(lambda e, m: torch.stack([*map(torch.mean, e)]).mean())),
    LossCase("a and a sum over nothing", masked(lambda e, m: (e * m).sum() / m.sum() + 0.0 * e.sum())),
    LossCase("distillation", distillation(temperature=2.0, share=0.7)),
    LossCase("gradient penalty", task(lambda: PointNet(1), gradient_penalty, x=normal(POINT), y=normal())),
    LossCase("diffusion", denoising(lambda ratio: torch.ones_like(ratio))),
    LossCase("diffusion, weights min(SNR, 5) / SNR", denoising(lambda ratio: ratio.clamp(max=5) / ratio)),
]
