"""Detect vacuous comparisons: two steps are also equal if neither does anything."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from lightning_fasttrain.core.messages import list_some
from lightning_fasttrain.proof.verification.compare_records import Distances
from lightning_fasttrain.proof.verification.digest import Digest, find_differences
from lightning_fasttrain.proof.verification.record_steps import StepRecord
from lightning_fasttrain.technique import Technique

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
    gap, size = _gap(plain), abs(plain.losses[0])
    found = _gap(other)
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
