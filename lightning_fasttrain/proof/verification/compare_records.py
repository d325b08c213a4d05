"""Compare the distance of a record from the plain one with the limit of its exactness class."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fasttrain.proof.verification.record_steps import Digests, StepRecord

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


_EPSILON = torch.finfo(torch.float32).eps
_ROUNDINGS = 32  # float32 roundings of the total that are always allowed: measured noise may be zero by chance
_TURNED = 0.4  # of a typical entry, times 16: effect of eight entries whose sign rounding flips in Adam


@dataclass(frozen=True)
class Distance:
    """Relative distance of one quantity from the plain step's, and its limit.

    Attributes:
        what: ``"loss"``, ``"gradients"``, ``"updates"``, ``"buffers"``, ``"evaluation"`` or ``"validation"``.
        error: relative error of the worst tensor; with a technique that has a bound, of all tensors together.
        allowed: the limit of the error.
        where: name of the worst tensor; "" if there is only one.
        share: error divided by its limit: above 1 training is different.
        bitwise: whether all tensors, or values, are bitwise equal.
    """

    what: str
    error: float
    allowed: float
    where: str
    share: float
    bitwise: bool = False

    @property
    def is_within(self) -> bool:
        return self.share <= 1.0


@dataclass(frozen=True)
class Allowance:
    """Limits of a comparison.

    Attributes:
        noise: rounding noise of the plain step.
        times: multiple of the noise that is allowed.
        bound: relative error that is allowed in addition; None for a technique that changes training.
        validates: whether results of validation are compared: they may be counts, which small errors change a lot.
    """

    noise: Distances
    times: float
    bound: float | None = 0.0
    validates: bool = False


def compare(plain: StepRecord, other: StepRecord, meaning: Meaning, allow: Allowance) -> list[Distance]:
    """Compare two records of the same steps, quantity by quantity.

    Args:
        plain: the reference.
        other: the same steps with techniques.
        meaning: the entries of updates that are compared.
        allow: the limits for ``other``.

    Returns:
        A distance for each quantity that both records have.
    """
    apart, noise = measure_distances(plain, other, meaning), allow.noise
    moved = {name: update.norm() for name, update in plain.updates()}
    rounded = _with_rounded_weights(noise["updates"], plain.before)
    few = {name: _TURNED * size / max(plain.before[name].numel, 1) ** 0.5 for name, size in moved.items()}
    all_rounded = _with_rounded_weights(noise["moves"], plain.before, few)
    buffers, others = {**plain.buffers, **plain.frozen}, {**other.buffers, **other.frozen}
    found = [
        _of_numbers("loss", plain.losses, other.losses, apart, allow),
        _of_digests("gradients", plain.gradients, other.gradients, apart, allow),
        _worse(
            _of_tensors("updates", apart["updates"], moved, rounded, allow),
            _of_tensors("updates", apart["moves"], moved, all_rounded, allow),
            _are_bitwise(plain.after, other.after),
        ),
        _of_digests("buffers", buffers, others, apart, allow),
        _of_numbers("evaluation", plain.evaluation, other.evaluation, apart, allow),
    ]
    if allow.validates:
        found.append(_of_digests("validation", plain.validated, other.validated, apart, allow))
    return list(filter(None, found))


def _of_digests(what: str, plain: Digests, other: Digests, apart: Distances, allow: Allowance) -> Distance | None:
    sizes: dict[str, float] = {}
    noises: dict[str, float] = {}
    for name in apart[what]:
        sizes[name] = plain[name].norm()
        # In 16 bits two parts of a sum are rounded where they are stored, though the measured noise be zero by chance.
        noises[name] = allow.noise[what].get(name, 0.0)
        if plain[name].dtype.is_floating_point:
            stored = 2 * torch.finfo(plain[name].dtype).eps * sizes[name]
            noises[name] = max(noises[name], stored / allow.times)
    worst = _of_tensors(what, apart[what], sizes, noises, allow)
    return _worse(worst, None, _are_bitwise(plain, other))


def _worse(one: Distance | None, other: Distance | None, bitwise: bool) -> Distance | None:
    both = list(filter(None, (one, other)))
    if not both:
        return None
    return replace(max(both, key=lambda distance: distance.share), bitwise=bitwise)


def _are_bitwise(plain: Digests, other: Digests) -> bool:
    return set(plain) == set(other) and all(plain[name].is_same(other[name]) for name in plain)


def _with_rounded_weights(
    noises: Mapping[str, float], weights: Digests, more: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Add rounding of the weights, since an update is a small difference of large values that were both rounded."""
    rounded: dict[str, float] = {}
    for name, weight in weights.items():
        least = torch.finfo(weight.dtype).eps * weight.norm() + (more or {}).get(name, 0.0)
        rounded[name] = noises.get(name, 0.0) + least
    return rounded


def _of_numbers(
    what: str, plain: Sequence[float | None], other: Sequence[float | None], apart: Distances, allow: Allowance
) -> Distance | None:
    """Return the worst distance among a few scalars; those that one of the records does not know are left out."""
    distances: dict[str, float] = {}
    sizes: dict[str, float] = {}
    noises: dict[str, float] = {}
    least_noise, bitwise = 0.0, True
    if what == "evaluation":
        # If rounding was not evaluated, its effect on the step's own loss is used.
        least_noise = allow.noise["loss"].get("0", 0.0)
    for number, (one, another) in enumerate(zip(plain, other, strict=False)):
        if one is not None and another is not None:
            name = str(number)
            distances[name], sizes[name] = apart[what][name], one
            noises[name] = max(allow.noise[what].get(name, 0.0), least_noise)
            bitwise = bitwise and one == another
    worst = _of_tensors(what, distances, sizes, noises, allow)
    return worst and replace(worst, where="", bitwise=bitwise)


def _of_tensors(
    what: str, apart: Mapping[str, float], sizes: Mapping[str, float], noises: Mapping[str, float], allow: Allowance
) -> Distance | None:
    if not apart:
        return None
    # Such a bound holds for the complete gradient, not for each tensor.
    if allow.bound:
        apart, sizes, noises = {"": _norm(apart)}, {"": _norm(sizes)}, {"": _norm(noises)}
    distances = [_distance(what, name, apart[name], abs(sizes[name]), noises.get(name, 0.0), allow) for name in apart]
    return max(distances, key=lambda distance: distance.share)


def _distance(what: str, name: str, apart: float, size: float, noise: float, allow: Allowance) -> Distance:
    least = max(size, 1e-300)  # a tensor may be all zeros
    # times · noise + (32 ε + bound) · size, all absolute.
    allowed = allow.times * noise + (_ROUNDINGS * _EPSILON + (allow.bound or 0.0)) * size
    if apart != apart:  # NaN
        return Distance(what, apart, allowed / least, name, float("inf"))
    share = 0.0
    if allow.bound is not None and apart > 0:
        share = apart / max(allowed, 1e-300)
    return Distance(what, apart / least, allowed / least, name, share)


def _norm(norms: Mapping[str, float]) -> float:
    return sum(norm * norm for norm in norms.values()) ** 0.5
