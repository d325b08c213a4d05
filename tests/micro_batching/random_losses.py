"""Random losses: sums of terms, each of which reduces the token losses of a tiny model in some way.

A seed gives the same loss each time; its name is the formula. Axes: B samples, T tokens of a sample.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tests.micro_batching.loss_models import LENGTH, LossCase, TokenNet, Training, kept, labelled, normal, weights

SIZES = (8, 7, 10)  # samples of each batch
LARGEST = 30.0  # larger gradients amplify rounding
Fields = dict[str, Tensor]  # the batch, and the losses of each token


@dataclass(frozen=True)
class Expression:
    """A formula and the function that computes it."""

    text: str
    value: Callable[[Fields], Tensor]


def leaf(name: str) -> Expression:
    return Expression(name, lambda fields: fields[name])


def joined(template: str, compute: Callable[..., Tensor], *inner: Expression) -> Expression:
    """Apply ``compute`` to the inner expressions, and insert their texts into the template."""
    return Expression(
        template.format(*(e.text for e in inner)), lambda fields: compute(*(e.value(fields) for e in inner))
    )


# A loss of each token (B, T), masks and weights (B, T), and the ways to reduce them to one number.

EACH = [leaf(name) for name in ("cross", "square", "absolute", "smooth")]
MASKS = [leaf(name) for name in ("m", "k")]
WEIGHTS = [leaf("w"), leaf("v"), *MASKS]

WITHOUT_MASK: list[tuple[str, Callable[..., Tensor]]] = [
    ("{0}.sum()", lambda e: e.sum()),
    ("{0}.sum() / 16", lambda e: e.sum() / 16),
    ("{0}.mean()", lambda e: e.mean()),
    ("{0}.mean(1).mean()", lambda e: e.mean(1).mean()),
    ("{0}.sum(1).mean()", lambda e: e.sum(1).mean()),
    ("{0}.mean(0).sum()", lambda e: e.mean(0).sum()),
    ("{0}.sum() / B", lambda e: e.sum() / len(e)),
    ("{0}.mean() * B / 8", lambda e: e.mean() * len(e) / 8),
]

WITH_MASK: list[tuple[str, Callable[..., Tensor]]] = [
    ("({0} * {1}).sum() / {1}.sum()", lambda e, m: (e * m).sum() / m.sum()),
    ("({0} * {1}).sum() / {1}.sum().clamp(min=1)", lambda e, m: (e * m).sum() / m.sum().clamp(min=1)),
    ("({0} * {1}).sum() / max({1}.sum().item(), 1)", lambda e, m: (e * m).sum() / max(m.sum().item(), 1)),
    ("({0} * {1}).sum() / ({1}.sum() + 1e-6)", lambda e, m: (e * m).sum() / (m.sum() + 1e-6)),
    ("({0} * {1}).sum() / ({1}.sum() + 1)", lambda e, m: (e * m).sum() / (m.sum() + 1)),
    ("({0} * {1}).sum() * (1 / {1}.sum())", lambda e, m: (e * m).sum() * (1 / m.sum())),
    ("({0} * {1} / {1}.sum()).sum()", lambda e, m: (e * m / m.sum()).sum()),
    ("{0}[{1} > 0].mean()", lambda e, m: e[m > 0].mean()),
    ("{0}[{1} > 0].sum()", lambda e, m: e[m > 0].sum()),
    ("({0} * {1}).mean()", lambda e, m: (e * m).mean()),
    ("({0} * {1}).sum() / B", lambda e, m: (e * m).sum() / len(e)),
    ("(({0} * {1}).sum(1) / {1}.sum(1).clamp(min=1)).mean()", lambda e, m: rows_of(e, m).mean()),
    ("(({0} * {1}).sum(1) / {1}.sum(1).clamp(min=1))[{1}.any(1)].mean()", lambda e, m: rows_of(e, m)[m.any(1)].mean()),
    ("(({0} * {1}).sum(0) / {1}.sum(0).clamp(min=1)).mean()", lambda e, m: rows_of(e.T, m.T).mean()),
    ("({0} * {1}).sum() / {1}.any(1).sum()", lambda e, m: (e * m).sum() / m.any(1).sum()),
    (
        "where({1}.sum() > 0, ({0} * {1}).sum() / {1}.sum().clamp(min=1), 0)",
        lambda e, m: torch.where(m.sum() > 0, (e * m).sum() / m.sum().clamp(min=1), 0),
    ),
]

# These couple samples: rows are the means (B,) over the tokens of a sample.
OF_THE_BATCH: list[tuple[str, Callable[..., Tensor]]] = [
    ("{0}.mean(1).var(correction=0)", lambda e: e.mean(1).var(correction=0)),
    ("{0}.mean(1).logsumexp(0)", lambda e: e.mean(1).logsumexp(0)),
    ("({0}.mean(1)[:, None] * {0}.mean(1)).mean()", lambda e: (e.mean(1)[:, None] * e.mean(1)).mean()),
    ("{0}.mean(1).max()", lambda e: e.mean(1).max()),
    ("{0}.mean(0).square().sum()", lambda e: e.mean(0).square().sum()),
]

OF_ONE_NUMBER: list[tuple[str, Callable[..., Tensor]]] = [
    ("exp({0} / 4)", lambda x: (x / 4).exp()),
    ("sqrt({0} + 1)", lambda x: (x + 1).sqrt()),
    ("({0}).square()", lambda x: x.square()),
    ("log1p({0})", lambda x: x.log1p()),
]


def rows_of(e: Tensor, m: Tensor) -> Tensor:
    """Return the masked mean of each row."""
    return (e * m).sum(1) / m.sum(1).clamp(min=1)


def random_term(draw: random.Random) -> Expression:
    kind, each = draw.random(), draw.choice(EACH)
    if kind < 0.25:
        term = joined(*draw.choice(WITHOUT_MASK), each)
    elif kind < 0.85:
        term = joined(*draw.choice(WITH_MASK), each, draw.choice(WEIGHTS))
    else:
        term = joined(*draw.choice(OF_THE_BATCH), each)
    if draw.random() < 0.15:
        term = joined(*draw.choice(OF_ONE_NUMBER), term)
    if draw.random() < 0.4:
        factor = draw.choice([0.01, 0.3, 0.5, 2.0])
        term = joined(f"{factor} * {{0}}", lambda x: factor * x, term)
    return term


def random_expression(draw: random.Random) -> Expression:
    terms = [random_term(draw) for _ in range(draw.choice([1, 1, 1, 2, 2, 3]))]
    if len(terms) > 1 and draw.random() < 0.2:
        return joined("stack([" + ", ".join(f"{{{i}}}" for i in range(len(terms))) + "]).mean()", mean_of, *terms)
    return joined(" + ".join(f"{{{i}}}" for i in range(len(terms))), lambda *values: sum(values), *terms)


def mean_of(*values: Tensor) -> Tensor:
    return torch.stack(values).mean()


# Batches and the training.


def random_batches(g: Generator) -> list[Any]:
    """Draw batches of labels, targets, two masks and weights. In the first, masks are full and weights are equal."""

    def batch(number: int, size: int) -> dict[str, Tensor]:
        uneven = 0 if number == 0 else int(torch.randint(1, 5, (), generator=g))
        return {
            "ids": torch.randint(7, (size, LENGTH), generator=g),
            "y": labelled(-100, 7, LENGTH)(g, 1, size).clamp(min=0),
            "target": normal(LENGTH)(g, number, size),
            "m": kept(LENGTH)(g, uneven, size).double(),
            "k": kept(LENGTH, other=True)(g, uneven, size).double(),
            "w": weights(LENGTH)(g, uneven, size) * kept(LENGTH)(g, uneven, size),
            "v": weights(1)(g, uneven, size).expand(size, LENGTH),
        }

    return [batch(number, size) for number, size in enumerate(SIZES)]


def losses_of_tokens(net: nn.Module, batch: Any) -> Fields:
    z, y = net(batch["ids"]), batch["y"]
    return {
        **batch,
        "cross": F.cross_entropy(z.mT, y, reduction="none"),
        "square": (z[..., 0] - batch["target"]).square(),
        "absolute": (z[..., 1] - batch["target"]).abs(),
        "smooth": F.softplus(z[..., 2]),
    }


def random_training(expression: Expression, seed: int) -> Training:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = TokenNet().double()
    step = lambda batch: expression.value(losses_of_tokens(net, batch))  # noqa: E731
    return Training(net, step, random_batches(torch.Generator().manual_seed(seed)))


def is_stable(training: Training) -> bool:
    """Whether losses and gradients of the unsplit batches are finite and small."""
    parameters = list(training.module.parameters())
    for batch in training.batches:
        loss = training.step(batch)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        largest = torch.stack([loss.detach().abs(), *(gradient.abs().max() for gradient in gradients)]).max()
        if not largest <= LARGEST:  # so that NaN is rejected
            return False
    return True


def random_loss(seed: int) -> LossCase:
    """Draw formulas until one is stable."""
    draw = random.Random(seed)
    while True:
        expression = random_expression(draw)
        if is_stable(random_training(expression, seed)):
            return LossCase(expression.text, partial(random_training, expression))
