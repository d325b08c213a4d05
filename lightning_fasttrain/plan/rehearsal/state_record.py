"""All that a run's next step depends on, copied; and in what two copies differ, bit for bit."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

State = dict[str, Any]

_SMALL = 2**20  # bytes: larger tensors among attributes are data
_PLAIN = (bool, int, float, str, type(None))
_LIGHTNINGS = frozenset(vars(L.LightningModule()))  # what every module has, such as where it logs from


def record_state(trainer: L.Trainer, module: nn.Module) -> State:
    """Weights, buffers, optimizers, schedules and the step, by path; tensors are copies on the CPU."""
    state: State = {"global step": trainer.global_step}
    for name, parameter in module.named_parameters():
        state[f"weight {name}"] = _keep(parameter)
    for name, buffer in module.named_buffers():
        state[f"buffer {name}"] = _keep(buffer)
    for number, optimizer in enumerate(trainer.optimizers):
        state |= dict(_flatten(f"optimizer {number}", trainer.strategy.optimizer_state(optimizer)))
    for number, config in enumerate(trainer.lr_scheduler_configs):
        state |= dict(_flatten(f"schedule {number}", config.scheduler.state_dict()))
    return state


def persistent_only(state: State, module: nn.Module) -> State:
    """Without the buffers that no checkpoint holds, since they are not in ``state_dict``."""
    saved = set(module.state_dict())
    return {path: value for path, value in state.items() if not path.startswith("buffer ") or path[7:] in saved}


def record_attributes(trainer: L.Trainer, module: nn.Module) -> State:
    """Numbers, words and small tensors that callbacks, the module and its parts hold beside that."""
    state: State = {}
    for callback in trainer.callbacks:
        state |= dict(_attributes(type(callback).__name__, callback))
    for name, part in module.named_modules():
        state |= dict(_attributes(f"{type(module).__name__}{name and '.'}{name}", part))
    return state


def _attributes(owner: str, thing: object) -> Iterator[tuple[str, Any]]:
    for name, value in vars(thing).items():
        if name in _LIGHTNINGS:
            continue
        if isinstance(value, _PLAIN):
            yield f"{owner}.{name}", value
        elif isinstance(value, Tensor) and value.nbytes < _SMALL:
            yield f"{owner}.{name}", _keep(value)


def _flatten(path: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flatten(f"{path}.{key}", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _flatten(f"{path}[{number}]", part)
    elif isinstance(value, Tensor):
        yield path, _keep(value)
    elif isinstance(value, _PLAIN):
        yield path, value


def _keep(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).cpu().clone()  # cpu() alone may copy nothing


def find_differences(one: State, other: State) -> list[str]:
    """Paths that have another value, or that only one of the two has.

    Example:
        >>> nan = torch.tensor(float("nan"))
        >>> find_differences({"a": 1, "b": nan, "c": 0.0}, {"a": 2, "b": nan.clone(), "d": 0.0})
        ['a', 'c', 'd']
    """
    paths = dict.fromkeys([*one, *other])
    return [path for path in paths if path not in one or path not in other or not _are_same(one[path], other[path])]


def _are_same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other or (one != one and other != other))  # NaN is NaN
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(_bits(one), _bits(other)))


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, in which what is not a number equals itself."""
    # With one axis at least: a tensor without cannot be viewed in numbers of another size.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def measure_distance(one: object, other: object) -> float:
    """How far two values are apart; infinite where that is no number."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        return float((one.double() - other.double()).norm())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(abs(one - other))
    return float("inf")


def describe(value: object) -> str:
    """In few words."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of {' × '.join(map(str, value.shape))}"
    return f"{value.item()!r}" if isinstance(value, Tensor) else repr(value)[:40]


def describe_change(before: Any, after: Any) -> str:
    """What became of a value.

    Example:
        >>> describe_change(torch.zeros(3), torch.tensor([0.0, 0.5, 0.0])), describe_change(2, 5)
        ('is off by 0.5 in 1 of its 3 numbers', 'was 2 and is 5')
    """
    tensors = isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape
    if tensors and before.numel() > 1 and before.dtype == after.dtype:
        apart = (before.double() - after.double()).abs()
        return f"is off by {float(apart.max()):.2g} in {int((apart != 0).sum())} of its {apart.numel()} numbers"
    return f"was {describe(before)} and is {describe(after)}"
