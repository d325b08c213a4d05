"""Losses that are nonlinear or couple samples, so that only the backbone can be split."""

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
    Heads,
    LossCase,
    PointNet,
    TokenNet,
    Training,
    classes,
    images,
    kept,
    labelled,
    masked,
    normal,
    of_tokens,
    points,
    positives,
    task,
    token_ids,
    two_layers,
    uniform,
    weighted,
)


def dice_of_all(z: Tensor, b: Any) -> Tensor:
    p = z.sigmoid()
    return 1 - (2 * (p * b["y"]).sum() + 1) / ((p + b["y"]).sum() + 1)


def concordance(z: Tensor, b: Any) -> Tensor:
    """One minus Lin's concordance correlation coefficient."""
    x, y = z[:, 0], b["y"]
    covariance = ((x - x.mean()) * (y - y.mean())).mean()
    return 1 - 2 * covariance / (x.var(correction=0) + y.var(correction=0) + (x.mean() - y.mean()).square() + 1e-6)


class Uncertain(nn.Module):
    """Weights two tasks by learned uncertainties s: exp(-s) * loss + s."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Heads(2)
        self.s = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, b: Any) -> Tensor:
        losses = torch.stack([F.cross_entropy(z, b[f"y{i}"]) for i, z in enumerate(self.net(b["x"]))])
        return ((-self.s).exp() * losses + self.s).sum()


def with_penalty(reduction: str) -> Callable[[int], Training]:
    def step(net: nn.Module, b: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in net.parameters())
        return F.cross_entropy(net(b["x"]), b["y"], reduction=reduction) + 0.01 * penalty

    return task(PointNet, step, x=normal(POINT), y=classes())


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    scores = 4 * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    pairs = torch.arange(len(scores))
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = two_layers(), two_layers(3)
        self.project = nn.Linear(DIM, CLASSES)

    def forward(self, b: Any) -> Tensor:
        return info_nce(self.project(self.left(b["x"])), self.right(b["y"])[:, :CLASSES])


def two_views(loss: Callable[..., Tensor]) -> Callable[[int], Training]:
    """One backbone, called twice."""
    return task(PointNet, lambda net, b: loss(net(b["x"]), net(b["view"])), x=normal(POINT), view=normal(POINT))


def nt_xent(net: nn.Module, b: Any) -> Tensor:
    """SimCLR: both views in one call."""
    z = F.normalize(net(torch.cat([b["x"], b["view"]])), dim=-1)
    scores = (4 * z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(b["x"])))


def barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.var(0, correction=0) + 1e-2).sqrt() for z in (a, b))
    c = a.T @ b / len(a)
    on = torch.eye(len(c), dtype=torch.bool)
    return (c[on] - 1).square().sum() + 0.05 * c[~on].square().sum()


def vicreg(a: Tensor, b: Tensor) -> Tensor:
    spread = sum(F.relu(1 - (z.var(0, correction=0) + 1e-4).sqrt()).mean() for z in (a, b))
    return F.mse_loss(a, b) + 0.5 * spread


def supervised_contrastive(z: Tensor, b: Any) -> Tensor:
    """Mean over the positives of each sample, then over samples that have any."""
    z, itself = F.normalize(z, dim=-1), torch.eye(len(z), dtype=torch.bool)
    each = (4 * z @ z.T).masked_fill(itself, -1e9).log_softmax(-1)
    positive = (b["y"][:, None] == b["y"][None]) & ~itself
    n = positive.sum(1)
    return -((each * positive).sum(1)[n > 0] / n[n > 0]).sum() / (n > 0).sum().clamp(min=1)


def hardest_triplets(z: Tensor, b: Any) -> Tensor:
    distance, same = torch.cdist(z, z).square(), b["y"][:, None] == b["y"][None]
    far = distance.masked_fill(~same, -1).amax(1)
    near = distance.masked_fill(same, 1e3).amin(1)
    return F.relu(far - near + 0.2).mean() + 1e-3 * distance.mean()


def active_triplets(net: nn.Module, b: Any) -> Tensor:
    a, p, n = (net(b[name]) for name in ("x", "p", "n"))
    e = F.relu((a - p).square().sum(1) - (a - n).square().sum(1) + 0.2)
    return e.sum() / (e > 0).sum().clamp(min=1)


def pairwise_ranking(z: Tensor, b: Any) -> Tensor:
    higher = b["y"][:, None] > b["y"][None]
    return -(F.logsigmoid(z - z.T) * higher).sum() / higher.sum().clamp(min=1)


def cox(z: Tensor, b: Any) -> Tensor:
    """Partial likelihood of survival times."""
    order = b["time"].argsort(descending=True)
    risk, event = z[order, 0], b["event"][order]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def mean_discrepancy(net: Any, b: Any) -> Tensor:
    """Domain adaptation: labels of the source, and a kernel distance of source and target in the backbone's outputs."""
    hidden = net.backbone(b["x"])
    kernel = (-torch.cdist(hidden, hidden).square()).exp()
    source, target = b["source"].to(hidden), (~b["source"]).to(hidden)
    sign = source / source.sum() - target / target.sum().clamp(min=1)
    return F.cross_entropy(net.head(hidden)[b["source"]], b["y"][b["source"]]) + sign @ kernel @ sign


class Router(nn.Module):
    """Mixes experts of a backbone; its balance loss is f * P over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = TokenNet().encoder
        self.router, self.experts = nn.Linear(DIM, 3), nn.ModuleList([nn.Linear(DIM, VOCAB) for _ in range(3)])

    def forward(self, b: Any) -> Tensor:
        hidden = self.encoder(b["ids"])
        p = self.router(hidden).softmax(-1)
        z = sum(p[..., i, None] * expert(hidden) for i, expert in enumerate(self.experts))
        share = F.one_hot(p.argmax(-1), 3).to(p).mean((0, 1))
        return of_tokens(z, b["y"]) + 0.1 * 3 * (share * p.mean((0, 1))).sum()


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = PointNet()
        self.centers = nn.Parameter(torch.randn(CLASSES, DIM))

    def forward(self, b: Any) -> Tensor:
        hidden = self.net.backbone(b["x"])
        pull = (hidden - self.centers[b["y"]]).square().sum(1)
        counts = b["y"].bincount(minlength=CLASSES)
        return F.cross_entropy(self.net.head(hidden), b["y"]) + 0.1 * (pull / counts[b["y"]]).sum()


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.moments = two_layers(), nn.Linear(DIM, 4)
        self.decoder = nn.Sequential(nn.Linear(2, DIM), nn.Tanh(), nn.Linear(DIM, POINT))
        self.beta = 0.1

    def forward(self, b: Any) -> Tensor:
        mean, log_variance = self.moments(self.encoder(b["x"])).chunk(2, 1)
        decoded = self.decoder(mean + (log_variance / 2).exp() * b["noise"])
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return F.mse_loss(decoded, b["x"], reduction="sum") / len(mean) + self.beta * kl.mean()


class Queue(nn.Module):
    """MoCo: negatives are the features of earlier batches, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PointNet()
        self.register_buffer("queue", F.normalize(torch.randn(8, CLASSES), dim=-1))

    def forward(self, b: Any) -> Tensor:
        query, key = (F.normalize(self.net(b[name]), dim=-1) for name in ("x", "view"))
        key = key.detach()
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        self.queue.copy_(torch.cat([key, self.queue])[: len(self.queue)])
        return F.cross_entropy(4 * scores, torch.zeros(len(query), dtype=torch.long))


def mixed_up(partner: Callable[[Any], Tensor]) -> Callable[[int], Training]:
    """Mixup: each sample is mixed with another one of the batch."""

    def step(net: nn.Module, b: Any) -> Tensor:
        other = partner(b)
        z = net(0.7 * b["x"] + 0.3 * b["x"][other])
        return 0.7 * F.cross_entropy(z, b["y"]) + 0.3 * F.cross_entropy(z, b["y"][other])

    order = lambda g, number, size: torch.randperm(size, generator=g)  # noqa: E731
    return task(PointNet, step, x=normal(POINT), y=classes(), order=order)


def annealed_vae(seed: int) -> Training:
    training = task(VAE, lambda net, b: net(b), x=normal(POINT), noise=normal(2))(seed)
    training.after_step = lambda: setattr(training.module, "beta", training.module.beta + 0.2)
    return training


def late(g: torch.Generator, number: int, size: int) -> Tensor:
    """Return a factor of 0 in the first batch, which hides a term, and of 1 in all others."""
    return torch.full((size, 1), float(number > 0), dtype=torch.float64)


def with_late_sum(z: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(z, b["y"]) + (b["late"] * z).square().sum() / 8


def with_free_bits(z: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(z, b["y"]) + (b["late"] * z).square().mean(0).clamp(min=1e-3).sum()


def with_important_weights(net: nn.Module, b: Any) -> Tensor:
    """Penalize changes of weights, as in elastic weight consolidation."""
    penalties = [((p - 0.1).square() * p.detach().exp()).sum() for p in net.parameters()]
    return F.cross_entropy(net(b["x"]), b["y"]) + 0.1 * torch.stack(penalties).sum()


def of_module(make_net: Callable[[], nn.Module], **fields: Any) -> Callable[[int], Training]:
    """A module that returns its loss."""
    return task(make_net, lambda net, b: net(b), **fields)


LOSSES_OF_BATCHES = [
    # Losses nonlinear in one scalar.
    LossCase("RMSE", points(lambda z, b: F.mse_loss(z, b["y"]).sqrt(), y=normal(CLASSES))),
    LossCase("PSNR", points(lambda z, b: 10 * torch.log10(F.mse_loss(z, b["y"])), y=normal(CLASSES))),
    LossCase("perplexity", masked(lambda e, m: e[m].mean().exp())),
    LossCase("log-mean-exp", weighted(lambda e, w: (2 * e).exp().mean().log() / 2)),
    LossCase("norm of the losses", weighted(lambda e, w: e.norm())),
    LossCase("flooding", weighted(lambda e, w: (e.mean() - 1).abs() + 1)),
    LossCase("dice of all", images(dice_of_all, out=1, y=positives(1, 5, 5))),
    LossCase("concordance", points(concordance, y=normal())),
    LossCase("learned uncertainty", of_module(Uncertain, x=normal(POINT), y0=classes(), y1=classes())),
    LossCase(
        "learned uncertainty, labels missing", of_module(Uncertain, x=normal(POINT), y0=labelled(-100), y1=classes())
    ),
    LossCase("mean + weight penalty", with_penalty("mean")),
    LossCase("sum + weight penalty", with_penalty("sum")),
    LossCase("mean + penalty of moved weights", task(PointNet, with_important_weights, x=normal(POINT), y=classes())),
    LossCase("mean + sum / 8 that is idle at first", points(with_late_sum, y=classes(), late=late)),
    LossCase("free bits that are free at first", points(with_free_bits, y=classes(), late=late)),
    # Losses that couple samples.
    LossCase("two towers", of_module(Towers, x=normal(POINT), y=normal(3))),
    LossCase("one backbone, called twice", two_views(info_nce)),
    LossCase("NT-Xent", task(PointNet, nt_xent, x=normal(POINT), view=normal(POINT))),
    LossCase("Barlow twins", two_views(barlow_twins)),
    LossCase("VICReg", two_views(vicreg)),
    LossCase("supervised contrastive", points(supervised_contrastive, y=classes())),
    LossCase("hardest triplets", points(hardest_triplets, y=classes())),
    LossCase("active triplets", task(PointNet, active_triplets, x=normal(POINT), p=normal(POINT), n=normal(POINT))),
    LossCase("pairwise ranking", points(pairwise_ranking, out=1, y=normal())),
    LossCase("Cox", points(cox, time=uniform(), event=kept())),
    LossCase("domain adaptation", task(PointNet, mean_discrepancy, x=normal(POINT), y=classes(), source=kept())),
    LossCase(
        "entropy of the batch mean * 0.01",
        points(
            lambda z, b: F.cross_entropy(z, b["y"]) - 0.01 * torch.special.entr(z.softmax(-1).mean(0)).sum(),
            y=classes(),
        ),
    ),
    LossCase(
        "variance of the outputs",
        points(lambda z, b: F.mse_loss(z, b["y"]) + 0.1 * z.var(0, correction=0).sum(), y=normal(4)),
    ),
    LossCase("router", of_module(Router, ids=token_ids, y=labelled(-100, VOCAB, LENGTH))),
    LossCase("centers", of_module(Centers, x=normal(POINT), y=classes())),
    LossCase("VAE", of_module(VAE, x=normal(POINT), noise=normal(2))),
    LossCase("VAE, beta annealed", annealed_vae),
    LossCase("a queue of negatives", of_module(Queue, x=normal(POINT), view=normal(POINT))),
    LossCase("mixup with the batch reversed", mixed_up(lambda b: torch.arange(len(b["x"])).flip(0))),
    LossCase("mixup with partners in the batch", mixed_up(lambda b: b["order"])),
]
