"""This rank's part of a training state: plain tensors in place of shards, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_fasttrain.core.host.lightning import FabricModule, FabricOptimizer, Stateful
from lightning_fasttrain.core.modules.parameters import local_part, parameters_of
from lightning_fasttrain.core.state.by_parameter import find_by_parameter, replace_at


def local_state(state: Mapping[str, object]) -> dict[str, Any]:
    """Return the states of models, optimizers and other objects, with this rank's part of each sharded tensor.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> list(local_state({"model": net, "step": 3})["model"])
        ['weight', 'bias']
    """
    found = {}
    for key, value in state.items():
        value = _unwrap(value)
        found[key] = value.state_dict() if isinstance(value, Stateful) else value
    return tree_map_only(Tensor, _local, found)


@torch.no_grad()
def load_local_state_(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Load what :func:`local_state` returned on this rank into the objects of ``state``; plain values are replaced."""
    parameters: dict[str, Tensor] = {}
    for key, value in state.items():
        target = _unwrap(value)
        if isinstance(target, nn.Module):
            parameters.update(target.named_parameters())
            target.load_state_dict(_in_shards(saved[key], target.state_dict()))
    for key, value in state.items():
        target = _unwrap(value)
        if isinstance(target, Optimizer):
            target.load_state_dict(_state_of_optimizer(target, saved[key]))
        elif not isinstance(target, Stateful):
            state[key] = saved[key]
        elif not isinstance(target, nn.Module):
            target.load_state_dict(_averages_in_shards(saved[key], parameters))


def _state_of_optimizer(optimizer: Optimizer, saved: Mapping[str, object]) -> dict[str, Any]:
    held, states = parameters_of(optimizer), {}
    for number, values in saved["state"].items():
        states[number] = {name: _like(part, held[number]) for name, part in values.items()}
    return {**saved, "state": states}


def _averages_in_shards(saved: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    for keys, values in find_by_parameter(saved):
        saved = replace_at(saved, keys, _in_shards(values, parameters))
    return saved


def _in_shards(values: Mapping[str, object], wholes: Mapping[str, object]) -> dict[str, Any]:
    return {name: _like(part, wholes.get(name)) for name, part in values.items()}


def _unwrap(value: object) -> Any:
    if isinstance(value, FabricModule):
        return value.module
    if isinstance(value, FabricOptimizer):
        return value.optimizer
    return value


def _local(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach())


def _like(part: object, whole: object) -> Any:
    """Return a part of a tensor as a shard in the layout of ``whole``, if it is one of its shape."""
    if not isinstance(part, Tensor) or not isinstance(whole, DTensor) or part.shape != whole.to_local().shape:
        return part
    known: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(part.to(whole.device), whole.device_mesh, whole.placements, **known)
