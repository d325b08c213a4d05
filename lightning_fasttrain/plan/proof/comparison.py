"""Holds the distance of a record from the plain one against what its exactness class allows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fasttrain.plan.proof.step_record import StepRecord
from lightning_fasttrain.plan.proof.yardstick import Distances, Meaning, measure_distances

_EPSILON = torch.finfo(torch.float32).eps
_ROUNDINGS = 32  # float32 roundings of the whole that are always allowed: noise may be zero by chance


@dataclass(frozen=True)
class Distance:
    """How far one quantity is from the plain step's, relative to its size, and how far it may be.

    Attributes:
        what: ``"loss"``, ``"gradients"``, ``"updates"``, ``"buffers"`` or ``"evaluation"``.
        error: of the worst tensor; of a technique with a bound, of all tensors together.
        allowed: of the same.
        where: its name; "" where there is but one.
        share: error by what is allowed: above 1 it is another training.
    """

    what: str
    error: float
    allowed: float
    where: str
    share: float

    @property
    def is_within(self) -> bool:
        return self.share <= 1.0


@dataclass(frozen=True)
class Allowance:
    """What a comparison tolerates.

    Attributes:
        noise: of the plain step.
        times: how much of it is allowed.
        bound: relative error that is allowed beside it; None for a technique that changes training.
    """

    noise: Distances
    times: float
    bound: float | None = 0.0


def compare(plain: StepRecord, other: StepRecord, meaning: Meaning, allow: Allowance) -> list[Distance]:
    """Compare two records of the same steps, quantity by quantity.

    Args:
        plain: what is compared with.
        other: the same steps with techniques.
        meaning: which entries of updates are compared.
        allow: how far ``other`` may be.

    Returns:
        A distance for each quantity that both have.
    """
    apart, noise = measure_distances(plain, other, meaning), allow.noise
    found = [_of_numbers("loss", apart.losses, plain.losses, noise.losses, allow)]
    for what, norms, tensors, noises in (
        ("gradients", apart.gradients, plain.gradients, noise.gradients),
        ("updates", apart.updates, plain.updates, noise.updates),
        ("buffers", apart.buffers, plain.buffers, noise.buffers),
    ):
        sizes = {name: float(tensors[name].double().norm()) for name in norms}
        if what == "updates":  # a small difference of large numbers, each of which was rounded
            noises = _with_rounded_weights(noises, plain.before)
        found.append(_of_tensors(what, norms, sizes, noises, allow))
    losses = [loss for loss in plain.evaluation if loss is not None]
    found.append(_of_numbers("evaluation", apart.evaluation, losses, noise.evaluation, allow))
    return [distance for distance in found if distance is not None]


def _with_rounded_weights(noises: Mapping[str, float], weights: Mapping[str, Tensor]) -> dict[str, float]:
    rounded: dict[str, float] = {}
    for name, weight in weights.items():
        rounded[name] = noises.get(name, 0.0) + torch.finfo(weight.dtype).eps * float(weight.double().norm())
    return rounded


def _of_numbers(
    what: str, apart: list[float], sizes: list[float], noises: list[float], allow: Allowance
) -> Distance | None:
    """The worst of a few numbers."""
    names = [str(number) for number in range(len(apart))]
    padded = [*noises, *[0.0] * len(names)]  # noise may be known of fewer losses than there are
    named = dict(zip(names, padded, strict=False))
    worst = _of_tensors(what, dict(zip(names, apart, strict=True)), dict(zip(names, sizes, strict=False)), named, allow)
    return worst and Distance(what, worst.error, worst.allowed, "", worst.share)


def _of_tensors(
    what: str, apart: Mapping[str, float], sizes: Mapping[str, float], noises: Mapping[str, float], allow: Allowance
) -> Distance | None:
    if not apart:
        return None
    if allow.bound:  # such a bound is one of the whole gradient, not of each tensor
        apart, sizes, noises = ({"": _norm(part)} for part in (apart, sizes, noises))
    distances = [_distance(what, name, apart[name], abs(sizes[name]), noises.get(name, 0.0), allow) for name in apart]
    return max(distances, key=lambda distance: distance.share)


def _distance(what: str, name: str, apart: float, size: float, noise: float, allow: Allowance) -> Distance:
    least = max(size, 1e-300)  # a tensor may be zero throughout
    # times · noise + (32 ε + bound) · size, all absolute.
    allowed = allow.times * noise + (_ROUNDINGS * _EPSILON + (allow.bound or 0.0)) * size
    if apart != apart:  # not a number
        return Distance(what, apart, allowed / least, name, float("inf"))
    share = 0.0
    if allow.bound is not None and apart > 0:
        share = apart / max(allowed, 1e-300)
    return Distance(what, apart / least, allowed / least, name, share)


def _norm(norms: Mapping[str, float]) -> float:
    return sum(norm * norm for norm in norms.values()) ** 0.5
