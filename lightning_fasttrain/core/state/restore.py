"""Save and restore everything a training step changes besides gradients."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fasttrain.core.state.metrics import MetricState, read_metric, write_metric_
from lightning_fasttrain.core.state.rng import random_state, set_random_state

_OF_MODULES = frozenset(vars(nn.Module()))  # hooks and the like are not results of a step
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (int, float, str, type(None))
_LARGE = 2**26  # bytes: such tensors are data or tables that a step only reads


def remember(models: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember random states and what the ``models`` hold beside parameters; returns how to put it back.

    That is buffers, metrics, and attributes that are numbers, strings, tensors or containers (the container itself, not
    what lies deeper). What a step changes elsewhere is not undone. It can be restored several times.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.losses = []
        >>> restore_all = remember([net])
        >>> net.losses.append(0.5)
        >>> restore_all()
        >>> net.losses
        []
    """
    generators = random_state()
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    places = [(module._buffers, name) for module in modules for name in module._buffers]
    buffers = [(held, name, held[name], _copy_of(held[name])) for held, name in places]
    metrics = [module for module in modules if isinstance(module, Metric)]
    states = [(metric, read_metric(metric)) for metric in metrics]
    restore_attributes = remember_attributes(module for module in modules if not isinstance(module, Metric))

    def restore_all() -> None:
        set_random_state(generators)
        with torch.no_grad():
            for held, name, buffer, before in buffers:
                # The same tensor, since DDP and others hold it.
                held[name] = buffer
                if buffer is not None and before is not None:
                    _write_back(buffer, before)
        for metric, state in states:
            copies = {name: _copy_of(value) for name, value in state.values.items()}  # it may be restored again
            write_metric_(metric, MetricState(copies, state.updates))
        restore_attributes()

    return restore_all


def remember_attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember the attributes of these modules, as :func:`remember` does; returns how to put them back."""
    attributes = [(module, dict(_attributes(module))) for module in modules]

    def restore_all() -> None:
        for module, before in attributes:
            _restore_attributes(module, before)

    return restore_all


def remember_gradients(model: nn.Module) -> Callable[[], None]:
    """Remember the gradients that are there; returns how to put them back."""
    grads: list[tuple[nn.Parameter, Tensor | None]] = []
    for parameter in model.parameters():
        grads.append((parameter, _copy_of(parameter.grad)))

    def restore_all() -> None:
        for parameter, before in grads:
            # A copy, since the state may be restored again.
            parameter.grad = _copy_of(before)

    return restore_all


def _attributes(module: nn.Module) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Name → the value, and a copy of what it holds."""
    for name, value in vars(module).items():
        if name in _OF_MODULES:
            continue
        # Exactly these types: a subclass may not support being emptied and filled.
        kept = type(value) in _CONTAINERS or (isinstance(value, Tensor) and value.nbytes < _LARGE)
        if kept or isinstance(value, _PLAIN):
            yield name, (value, _copy_of(value))


def _restore_attributes(module: nn.Module, before: dict[str, tuple[object, object]]) -> None:
    now = vars(module)
    for name in [name for name, value in now.items() if isinstance(value, Tensor) and name not in before]:
        del now[name]  # made by the step, and perhaps it holds a graph
    for name, (value, copy) in before.items():
        # Past __setattr__, which a module may have of its own.
        now[name] = value
        _refill(value, copy)


def _refill(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            _write_back(value, copy)
    elif isinstance(value, _CONTAINERS):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(copy)


def _write_back(tensor: Tensor, before: Tensor) -> None:
    """Restore a tensor only where it was changed, since a graph that saved it takes any write for a change."""
    if not torch.equal(tensor, before):
        tensor.copy_(before)


def _copy_of(value: object) -> Any:
    """Copy a tensor or a container; None and plain values stay as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, _CONTAINERS) else value
