"""Measure the distance between two records of the same steps, and the distance that rounding alone causes."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_fasttrain.dry_run.verification.step_record import Digests, StepRecord

_ABOVE_NOISE = 8.0  # times the typical rounding error: larger entries of a gradient are significant


# Quantity → name → absolute distance of two records, a Euclidean norm. Losses and evaluations have numbers as names.
# "updates" covers the significant entries of the optimizer's updates, "moves" all of them; "buffers" also frozen
# weights that both records changed.
Distances = dict[str, dict[str, float]]
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
    return {
        "loss": _differences(one.losses, other.losses),
        "gradients": _norms_of_differences(one.gradients, other.gradients),
        "updates": updates,
        "moves": moves,
        "buffers": _norms_of_differences({**one.buffers, **one.frozen}, {**other.buffers, **other.frozen}),
        "validation": _norms_of_differences(one.validated, other.validated),
        "evaluation": _differences(one.evaluation, other.evaluation),
    }


def take_largest(distances: Iterable[Distances]) -> Distances:
    """Return the largest of each distance."""
    largest: Distances = {}
    for each in distances:
        for quantity, found in each.items():
            kept = largest.setdefault(quantity, {})
            for name, norm in found.items():
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
        typical = noise["gradients"].get(key, 0.0) / max(gradient.numel, 1) ** 0.5  # ‖noise‖ / √n: noise of one entry
        means = gradient.entries.abs() > _ABOVE_NOISE * typical
        if name in meaning:
            means &= meaning[name]
        meaning[name] = means
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


def _differences(one: Sequence[float | None], other: Sequence[float | None]) -> dict[str, float]:
    found: dict[str, float] = {}
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        found[str(number)] = 0.0 if a is None or b is None else abs(a - b)
    return found


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
