"""Measure the distance between two records of the same steps, and the distance that rounding alone causes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_fasttrain.dry_run.verification.step_record import Digests, StepRecord

_ABOVE_NOISE = 8.0  # times the typical rounding error: larger entries of a gradient are significant


@dataclass
class Distances:
    """Absolute distances between two records, each a Euclidean norm.

    Attributes:
        losses: one for each batch.
        gradients, updates, buffers, validated: by name; for updates only significant entries; buffers include frozen
            weights that both records changed.
        moves: distances over all entries of the updates.
        evaluation: at the start and at the end.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    moves: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    evaluation: list[float] = field(default_factory=list)


BY_NAME = ("gradients", "updates", "moves", "buffers", "validated")
Meaning = dict[str, Tensor]


def measure_distances(one: StepRecord, other: StepRecord, meaning: Meaning) -> Distances:
    """Measure the distance of ``other`` from ``one``.

    Args:
        one: the reference.
        other: a record of the same steps.
        meaning: name of a weight → the entries that are compared, see :func:`find_meaning`; all entries of weights
            that are not listed.
    """
    updates, moves = _differences_of_updates(one, other, meaning)
    return Distances(
        losses=_differences(one.losses, other.losses),
        gradients=_norms_of_differences(one.gradients, other.gradients),
        updates=updates,
        moves=moves,
        buffers=_norms_of_differences({**one.buffers, **one.frozen}, {**other.buffers, **other.frozen}),
        validated=_norms_of_differences(one.validated, other.validated),
        evaluation=_differences(one.evaluation, other.evaluation),
    )


def take_largest(distances: Iterable[Distances]) -> Distances:
    """Return the largest of each distance."""
    largest = Distances()
    for each in distances:
        largest.losses = _larger_of_lists(largest.losses, each.losses)
        largest.evaluation = _larger_of_lists(largest.evaluation, each.evaluation)
        for quantity in BY_NAME:
            kept: dict[str, float] = getattr(largest, quantity)
            for name, norm in getattr(each, quantity).items():
                kept[name] = max(norm, kept.get(name, 0.0))
    return largest


def find_meaning(plain: StepRecord, noise: Distances) -> Meaning:
    """Return the sampled entries of the gradients that exceed rounding noise in every step.

    Adam divides each entry by its own magnitude. Entries that are zero up to rounding, such as the gradient of a key's
    bias, become steps of full length in a random direction, which no two runs share.

    Args:
        plain: record with the gradients.
        noise: their rounding noise.
    """
    meaning: Meaning = {}
    for key, gradient in plain.gradients.items():
        name = key.partition(", step ")[0]
        typical = noise.gradients.get(key, 0.0) / max(gradient.numel, 1) ** 0.5  # ‖noise‖ / √n: noise of one entry
        means = gradient.entries.abs() > _ABOVE_NOISE * typical
        meaning[name] = means & meaning[name] if name in meaning else means
    return meaning


def nudge(seed: int) -> Callable[[nn.Module], None]:
    """Return a function that moves every weight to the next representable value above or below, as rounding might."""

    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    # On the CPU, so that all devices move the same weights, with a generator that no step uses.
                    up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
                    step = torch.finfo(parameter.dtype).eps
                    # Just below a power of two, values are half as far apart as just above it.
                    parameter.mul_(torch.where(up, 1 + step, 1 - step / 2).to(parameter.dtype))

    return change


def _differences(one: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    return [_difference(a, b) for a, b in zip(one, other, strict=False)]


def _difference(one: float | None, other: float | None) -> float:
    return 0.0 if one is None or other is None else abs(one - other)


def _norms_of_differences(one: Digests, other: Digests) -> dict[str, float]:
    norms: dict[str, float] = {}
    for name, digest in one.items():
        if name in other and other[name].shape == digest.shape:
            norms[name] = (other[name] - digest).norm()
    return norms


def _differences_of_updates(
    one: StepRecord, other: StepRecord, meaning: Meaning
) -> tuple[dict[str, float], dict[str, float]]:
    updates: dict[str, float] = {}
    moves: dict[str, float] = {}
    theirs = other.before
    for name, update in one.updates():
        if name in theirs and theirs[name].shape == update.shape:
            difference = other.after[name] - theirs[name] - update
            updates[name], moves[name] = difference.norm(meaning.get(name)), difference.norm()
    return updates, moves


def _larger_of_lists(one: list[float], other: list[float]) -> list[float]:
    longest = max(len(one), len(other))
    pairs = zip(_pad(one, longest), _pad(other, longest), strict=True)
    return [max(pair) for pair in pairs]


def _pad(numbers: list[float], length: int) -> list[float]:
    return [*numbers, *[0.0] * (length - len(numbers))]
