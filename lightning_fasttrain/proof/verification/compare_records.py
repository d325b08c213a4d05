"""Compare the distance of a record from the plain one with the limit of its exactness class."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.messages import list_some
from lightning_fasttrain.proof.verification.digest import Digest, find_differences
from lightning_fasttrain.proof.verification.record_steps import Digests, StepRecord
from lightning_fasttrain.technique import Technique

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


_MOST_STUCK = 0.05  # of the values in weights: if more do not move, small updates are lost to rounding
_LITTLE, _MUCH = 1e-4, 0.05  # relative
_SAME_LOSS = 1e-4  # of the loss: closer than this, no layer acts differently in training and evaluation
_QUANTIZED = 1e-2  # of the loss
_ROOT = "the module"
_FAR = 64 * torch.finfo(torch.float32).eps


def find_empty(record: StepRecord) -> list[str]:
    """Return reasons why a record shows nothing, so that equality with it is meaningless."""
    infinite = [loss for loss in record.losses if not math.isfinite(loss)]
    if infinite:
        return [f"The loss is {infinite[0]}: comparisons are meaningless. Check the batch."]
    if all(map(Digest.is_zero, record.gradients.values())):
        why = "Are all labels ignored, or is the loss cut off from the weights?"
        return [f"The gradient is zero everywhere, so that any step equals it. {why}"]
    if all(update.is_zero() for _, update in record.updates()):
        steps = len(record.losses)
        way_out = f"If warm-up starts with a learning rate of zero, use steps={steps + 1} or more"
        return [f"No weight moved in {steps} steps. {way_out}."]
    if not record.losses:  # with manual optimization a step need not return one
        return []
    first, last = record.losses[0], record.training
    # In 16 bits a loss may round to the same value after one step.
    if first == last and not _in_half_precision(record):
        return ["The loss is constant: weights moved, but the same batch has the same loss as before."]
    return []


def find_unsteady(record: StepRecord, noise: Distances) -> list[str]:
    """Return weights whose update rounding changes a lot but whose gradient it does not: the optimizer is unstable."""
    unsteady = []
    for name, update in record.updates():
        if name in record.gradients:
            rounding = noise["gradients"].get(name, 0.0) / max(record.gradients[name].norm(), 1e-300)
            moved = noise["updates"].get(name, 0.0) / max(update.norm(), 1e-300)
            if rounding < _LITTLE and moved > _MUCH:
                unsteady.append((moved, name))
    if not unsteady:
        return []
    moved, name = max(unsteady)
    what = f"Rounding changes the optimizer's step of {name} by {moved:.0%}, but hardly its gradient"
    return [f"{what}: the optimizer computes a value that float32 cannot represent."]


def find_unheld(plain: StepRecord, other: StepRecord) -> list[str]:
    """Return parameters that techniques added or unfroze, and that no optimizer updates."""
    new = [name for name in other.unheld if name not in plain.unheld]
    if not new:
        return []
    return [f"{list_some(new)} require gradients with the techniques, but no optimizer holds them: they never move."]


def find_without_gradient(plain: StepRecord, other: StepRecord) -> list[str]:
    """Return parameters that lose their gradient with the techniques."""
    lost: list[str] = []
    for name in plain.before:
        if name in other.trains and _has_gradient(plain, name) and not _has_gradient(other, name):
            lost.append(name)
    if not lost:
        return []
    return [f"{list_some(lost)} have a gradient without the techniques, but not with them."]


def find_stuck(plain: StepRecord, other: StepRecord) -> list[str]:
    """Return new low-precision weights whose updates are smaller than the spacing of their values."""
    half: list[str] = []
    for name, before in other.before.items():
        if name not in plain.before and name in other.reached and before.dtype.itemsize < 4:
            half.append(name)
    moved, total = 0, 0
    for name in half:
        should_move = other.reached[name]
        total += int(should_move.sum())
        moved += int((should_move & (other.after[name].entries != other.before[name].entries)).sum())
    if total == 0 or moved >= (1 - _MOST_STUCK) * total:
        return []
    what = f"{1 - moved / total:.0%} of the values in {list_some(half)} have a gradient and did not move"
    return [f"{what}: in {str(other.before[half[0]].dtype).removeprefix('torch.')} small updates are rounded away."]


def find_unlike_evaluation(plain: StepRecord, other: StepRecord, noise: Distances, bound: float = 0.0) -> list[str]:
    """Return whether evaluation and training see different models only with the techniques.

    Args:
        plain: record without the techniques.
        other: record with them.
        noise: rounding noise of the plain record.
        bound: relative bound of the techniques.
    """
    gap, found = _gap(plain), _gap(other)
    size = abs(plain.losses[0]) if plain.losses else 0.0
    if gap is None or found is None or gap > _SAME_LOSS * size:
        return []
    # Kernels of quantized layers round differently in evaluation.
    if other.quantized:
        bound += _QUANTIZED
    allowed = 16 * max(gap, *noise["evaluation"].values(), 0.0) + (_FAR + bound) * size
    if found <= allowed:
        return []
    what = f"Training and evaluation see different models: on the same batch their losses differ by {found:.1e}"
    return [f"{what}, without the techniques by {gap:.0e}."]


def find_changed_base(plain: StepRecord, other: StepRecord, noise: Distances) -> list[str]:
    """Return whether the model differs from the plain one when its adapters are disabled."""
    if other.base is None or plain.evaluation[0] is None:
        return []
    apart, size = abs(other.base - plain.evaluation[0]), abs(plain.evaluation[0])
    if apart <= 16 * max(0.0, *noise["evaluation"].values()) + _FAR * size:
        return []
    return [f"With adapters disabled the model differs from the plain one: its loss is off by {apart / size:.1e}."]


def find_other_conduct(plain: StepRecord, other: StepRecord) -> list[str]:
    """List changes by techniques that do not show in the values of a step.

    Args:
        plain: record without them.
        other: record with them, if they do not declare that they change training.
    """
    found = [*_find_frozen(plain, other), *_find_modes(plain, other)]
    keys = find_differences(plain.state, other.state)
    if keys:
        found.append(f"state_dict has different entries: {list_some(keys)}.")
    if plain.numbers != other.numbers:
        found.append("The random state after a step differs from that after the plain step.")
    # Only modules of the plain model: those that a technique added may stay.
    acting = find_differences(plain.left_behind, {name: other.left_behind.get(name) for name in plain.left_behind})
    if acting:
        found.append(f"When the fit ends early, {_list(acting)} are left with different hooks from the plain model.")
    given = sorted(set(plain.validated) ^ set(other.validated))
    if given:
        found.append(f"Validation or prediction returns different results: {list_some(given)}.")
    return found


def _find_frozen(plain: StepRecord, other: StepRecord) -> Iterator[str]:
    moved = [name for name in other.frozen if name not in plain.frozen and name in plain.unmoved]
    if moved:
        yield f"{list_some(moved)} are frozen, but were changed."
    still = [name for name in plain.frozen if name not in other.frozen and name in other.unmoved]
    if still:
        yield f"{list_some(still)} are frozen but changed by the plain step, and did not change with the techniques."


def _find_modes(plain: StepRecord, other: StepRecord) -> Iterator[str]:
    for when, modes in plain.modes.items():
        theirs = {name: other.modes.get(when, modes).get(name, mode) for name, mode in modes.items()}
        for mode, called in ((False, "evaluation"), (True, "training")):
            switched = [name for name in find_differences(modes, theirs) if theirs[name] is mode]
            if switched:
                yield f"In {when} {_list(switched)} are in {called} mode, unlike without the techniques."


def _list(names: Iterable[str]) -> str:
    """List some of the names; the root module's name is empty."""
    return list_some([name or _ROOT for name in names])


def find_idle(model: nn.Module, techniques: Sequence[Technique]) -> set[str]:
    """Return the techniques that should change the model but leave it unchanged.

    Args:
        model: a copy that may be changed.
        techniques: copies of the techniques.
    """
    idle = set[str]()
    for technique in techniques:
        if technique.surgery is None:
            continue
        before = _structure(model)
        undo = technique.apply(model)
        # A technique that returns an undo has done something.
        if undo is None and _structure(model) == before:
            idle.add(str(technique))
    return idle


def _structure(model: nn.Module) -> list[tuple[object, ...]]:
    """Return the structure of a model that surgery may change, without its values."""
    found: list[tuple[object, ...]] = []
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks), module._compiled_call_impl is not None
        found.append((name, type(module), id(vars(module).get("forward")), *hooks))
    for name, parameter in model.named_parameters():
        found.append((name, parameter.shape, parameter.dtype, parameter.requires_grad))
    return found


def _gap(record: StepRecord) -> float | None:
    if record.training is None or record.evaluation[-1] is None:
        return None
    return abs(record.training - record.evaluation[-1])


def _has_gradient(record: StepRecord, name: str) -> bool:
    return not all(map(Digest.is_zero, record.gradients_of(name)))


def _in_half_precision(record: StepRecord) -> bool:
    return any(weight.dtype.itemsize < 4 for weight in record.before.values())
