"""Building blocks of the losses of these tests: models, fields of batches, and trainings that combine them.

The first batch of each training hides the normalizer of its loss; the later ones show it.
Axes: B samples, T tokens of a sample, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

SIZES = (12, 7, 10, 6, 9)  # samples of each batch; 2, 3 and 4 divide the first evenly
POINT, DIM, CLASSES, LENGTH, VOCAB = 5, 6, 4, 5, 7
RARE = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64)  # class weights
Draw = Callable[[Generator, int, int], Any]  # (generator, number of the batch, its size) -> one field of the batch


@dataclass
class Training:
    """A user's model, step and batches.

    Attributes:
        module: in float64.
        step: batch -> loss, or something that holds a loss.
        batches: the first one hides the rule.
        after_step: called after each optimizer step, like a user's loop.
    """

    module: nn.Module
    step: Callable[[Any], Any]
    batches: list[Any]
    after_step: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class LossCase:
    """One loss.

    Attributes:
        name: its name in the tests.
        make: seed -> the same training each time.
        refused: the message if this loss cannot be split exactly.
        tolerance: largest relative difference; more than rounding of float64 where the model itself rounds to float32.
    """

    name: str
    make: Callable[[int], Training]
    refused: str | None = None
    tolerance: float = 1e-9


# Models: a backbone in which samples are independent, and a head.


def two_layers(width: int = POINT) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh())


class PointNet(nn.Module):
    """Map points (B, 5) to (B, out)."""

    def __init__(self, out: int = CLASSES) -> None:
        super().__init__()
        self.backbone = two_layers()
        self.head = nn.Linear(DIM, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class CausalMean(nn.Module):
    """Add the mean of the earlier tokens to each token."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + torch.tanh(self.mix(before))


class TokenNet(nn.Module):
    """Map token ids (B, T) to logits (B, T, V)."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        embedding = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.Sequential(embedding, CausalMean(), CausalMean())
        self.head = nn.Linear(DIM, VOCAB)
        if tied:
            self.head.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(ids))


class ImageNet(nn.Module):
    """Map images (B, 3, 5, 5) to logits (B, C, 5, 5)."""

    def __init__(self, out: int = CLASSES) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, DIM, 3, padding=1), nn.Tanh(), nn.Conv2d(DIM, DIM, 3, padding=1), nn.Tanh()]
        self.encoder = nn.Sequential(*layers)
        self.decode = nn.Conv2d(DIM, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))


class Heads(nn.Module):
    """One backbone, several heads: points (B, 5) -> a list of logits (B, C)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.backbone = two_layers()
        self.heads = nn.ModuleList([nn.Linear(DIM, CLASSES) for _ in range(count)])

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.backbone(x)
        return [head(hidden) for head in self.heads]


# Fields of a batch. The first batch (number 0) hides the rule; the later ones are uneven in different ways.


def kept(*shape: int, other: bool = False, empty: bool = False) -> Draw:
    """Return masks (B, *shape): all True at first; later random, with half of the rows or all rows but one empty.

    ``other`` turns the order of the rows around, for a second head. ``empty`` keeps nothing at all in the last batch.
    """

    def draw(g: Generator, number: int, size: int) -> Tensor:
        mask = torch.rand(size, *shape, generator=g) < 0.5
        empty_rows = {2: size // 2, 3: size - 1}.get(number, 0)
        mask[:empty_rows] = False
        mask.view(-1)[-1] = True
        if number == 0:
            mask[:] = True
        if empty and number == len(SIZES) - 1:
            mask[:] = False
        return mask.flip(0) if other else mask

    return draw


def prefixes(length: int) -> Draw:
    """Return attention masks (B, length) of at least one token: all True at first, later as uneven as :func:`kept`."""

    def draw(g: Generator, number: int, size: int) -> Tensor:
        lengths = 1 + kept(length - 1)(g, number, size).sum(1)
        return torch.arange(length) < lengths[:, None]

    return draw


def classes(count: int = CLASSES, *shape: int) -> Draw:
    """Return labels (B, *shape): all of one class at first; later random, sorted, and all 0 but in the last row."""

    def draw(g: Generator, number: int, size: int) -> Tensor:
        labels = torch.randint(count, (size, *shape), generator=g)
        if number == 0:
            labels[:] = 1
        if number == 2:
            labels = labels.sort(0).values
        if number == 3:
            labels[:-1], labels[-1] = 0, count - 1
        return labels

    return draw


def labelled(ignored: int, count: int = CLASSES, *shape: int, other: bool = False) -> Draw:
    """Return labels (B, *shape) of :func:`classes`, replaced by ``ignored`` where :func:`kept` is False."""

    def draw(g: Generator, number: int, size: int) -> Tensor:
        labels = classes(count, *shape)(g, number, size)
        if ignored == 0:
            labels = labels.clamp(min=1)
        return labels.masked_fill(~kept(*shape, other=other)(g, number, size), ignored)

    return draw


def positives(*shape: int, empty: bool = False) -> Draw:
    """Return targets of 0 and 1 (B, *shape): one positive per row at first, later the masks of :func:`kept`."""
    keep = kept(*shape, empty=empty)

    def draw(g: Generator, number: int, size: int) -> Tensor:
        mask = keep(g, number, size)
        if number == 0:
            mask = torch.zeros_like(mask)
            mask.view(size, -1)[:, 0] = True
        return mask.double()

    return draw


def weights(*shape: int) -> Draw:
    """Return positive weights (B, *shape): equal at first, later of very different magnitudes."""

    def draw(g: Generator, number: int, size: int) -> Tensor:
        drawn = torch.rand(size, *shape, generator=g, dtype=torch.float64) ** 3 + 0.01
        drawn[: size - 1 if number == 3 else 0] *= 0.1
        return torch.full_like(drawn, 0.5) if number == 0 else drawn

    return draw


def normal(*shape: int) -> Draw:
    return lambda g, number, size: torch.randn(size, *shape, generator=g, dtype=torch.float64)


def uniform(*shape: int) -> Draw:
    return lambda g, number, size: torch.rand(size, *shape, generator=g, dtype=torch.float64)


def probabilities(*shape: int) -> Draw:
    return lambda g, number, size: normal(*shape)(g, number, size).softmax(-1)


def signs(*shape: int) -> Draw:
    return lambda g, number, size: 2.0 * kept(*shape)(g, number, size).double() - 1


def with_gaps(*shape: int) -> Draw:
    """Return regression targets (B, *shape) that are NaN where :func:`kept` is False."""
    return lambda g, number, size: normal(*shape)(g, number, size).masked_fill(
        ~kept(*shape)(g, number, size), torch.nan
    )


def token_ids(g: Generator, number: int, size: int) -> Tensor:
    return torch.randint(VOCAB, (size, LENGTH), generator=g)


# From these, trainings.


def task(
    make_net: Callable[[], nn.Module],
    step: Callable[[Any, Any], Any],
    form: Callable[[dict[str, Any]], Any] = dict,
    **fields: Draw,
) -> Callable[[int], Training]:
    """Return a function that makes a training of ``step(net, batch)`` on batches of these fields."""

    def make(seed: int) -> Training:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = make_net().double()
        g = torch.Generator().manual_seed(seed)
        drawn = [{name: draw(g, i, size) for name, draw in fields.items()} for i, size in enumerate(SIZES)]
        return Training(net, lambda batch: step(net, batch), [form(batch) for batch in drawn])

    return make


def points(loss: Callable[[Tensor, Any], Any], out: int = CLASSES, **fields: Any) -> Callable[[int], Training]:
    return task(lambda: PointNet(out), lambda net, b: loss(net(b["x"]), b), x=normal(POINT), **fields)


def tokens(loss: Callable[[Tensor, Any], Any], tied: bool = False, **fields: Any) -> Callable[[int], Training]:
    return task(lambda: TokenNet(tied), lambda net, b: loss(net(b["ids"]), b), ids=token_ids, **fields)


def images(loss: Callable[[Tensor, Any], Any], out: int = CLASSES, **fields: Any) -> Callable[[int], Training]:
    return task(lambda: ImageNet(out), lambda net, b: loss(net(b["pixels"]), b), pixels=normal(3, 5, 5), **fields)


def masked(reduce: Callable[[Tensor, Tensor], Any], empty: bool = False) -> Callable[[int], Training]:
    """A language model; ``reduce`` gets the loss of each token (B, T) and a mask (B, T)."""
    each = lambda z, b: reduce(each_token(z, b["y"]), b["mask"])  # noqa: E731
    return tokens(each, y=classes(VOCAB, LENGTH), mask=kept(LENGTH, empty=empty))


def weighted(reduce: Callable[[Tensor, Tensor], Any]) -> Callable[[int], Training]:
    """A classifier; ``reduce`` gets the loss of each sample (B,) and its weight (B,)."""
    each = lambda z, b: F.cross_entropy(z, b["y"], reduction="none")  # noqa: E731
    return points(lambda z, b: reduce(each(z, b), b["weight"]), y=classes(), weight=weights())


def each_token(z: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none", **settings).view(y.shape)


def of_tokens(z: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **settings)


def binary(z: Tensor, b: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, b["y"], reduction="none")
