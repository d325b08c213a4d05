"""State kept for sharded parameters, by their names: split for saving, and joined on any mesh."""

import itertools
import os
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim import Optimizer

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import names_of_parameters, parameters_of
from lightning_fasttrain.core.safe_load import as_corrupt
from lightning_fasttrain.core.state.values import find_by_parameter, replace_at, split_tensors
from lightning_fasttrain.optim.closure_optimizer import Groups, groups_over

# Layouts of a tensor; otherwise the dimension that it is sharded along.
_PLAIN, _REPLICATED = "plain", "replicated"


# Why not torch.distributed.checkpoint.state_dict? It initializes missing state by a step with gradients of zero, which
# changes what a checkpoint from before the first step holds and runs a step of the user's optimizer.
def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with parameter names instead of indices, and the optimizer's class.

    No state is initialized for it, so that an optimizer that has taken no step is saved without state.

    Raises:
        ValueError: the optimizer holds a parameter that is not in the model, or state that each rank keeps for its
            own shard only.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> named_state(net, torch.optim.SGD(net.parameters(), lr=0.1))["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    names = names_of_parameters(model)
    held = parameters_of(optimizer)
    unknown = len(set(held) - names.keys())
    if unknown:
        what = f"{type(optimizer).__name__} holds {unknown} parameters that the model no longer has"
        why = "their state would belong to no parameter"
        raise ValueError(explain(what, why, "Make the optimizer from the model's parameters, after sharding"))
    # torch numbers parameters in the order of the groups, so a number is an index into `held`.
    numbered, by_number = optimizer.state_dict(), list(map(names.__getitem__, held))
    state = {}
    for number, values in numbered["state"].items():
        name = by_number[number]
        for key, value in values.items():
            _refuse_local(type(optimizer).__name__, f"{name}/{key}", value, held[number])
        state[name] = dict(values)
    groups = groups_over(numbered["param_groups"], by_number.__getitem__)
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}


def _refuse_local(optimizer: str, name: str, value: object, parameter: Tensor) -> None:
    # On one process a shard is the complete tensor.
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return
    known = (Shard, _StridedShard, Replicate)
    if isinstance(value, DTensor):
        bad = not all(isinstance(placement, known) for placement in value.placements)
    else:
        # A step counter is identical on all ranks.
        bad = value.ndim > 0 and value.numel() > 1
    if bad:
        raise ValueError(
            explain(
                f"state '{name}' of {optimizer} has shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}",
                "each rank keeps it for its own shard, so it cannot be loaded on another number of ranks",
                "Use an optimizer of torch.optim",
            )
        )


def take_apart(state: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a named state into its tensors, and plain values with each tensor's layout."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"class": state["class"], "param_groups": state["param_groups"], "layout": {}, "values": {}}
    for name, values in state["state"].items():
        for key, value in values.items():
            # Keys of torch.optim contain no slash; parameter names contain dots.
            path = f"{name}/{key}"
            if isinstance(value, Tensor):
                tensors[path] = value
                plain["layout"][path] = _layout(value)
            else:
                plain["values"][path] = value
    return tensors, plain


def is_taken_apart(state: object) -> bool:
    """Return whether this is the plain part of an optimizer's state, as :func:`take_apart` makes it."""
    kinds = {"class": str, "param_groups": list, "layout": dict, "values": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(part), kind) for part, kind in kinds.items()):
        return False
    groups = state["param_groups"]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return False
    return all(isinstance(name, str) for name in (*state["layout"], *state["values"], *_names_in(groups)))


def _names_in(groups: Groups) -> list[str]:
    return list(itertools.chain.from_iterable(map(itemgetter("params"), groups)))


def _layout(tensor: Tensor) -> str | int:
    if not isinstance(tensor, DTensor):
        return _PLAIN
    for placement in tensor.placements:
        if isinstance(placement, Shard):
            return placement.dim
    return _REPLICATED


def template(size: torch.Size, dtype: torch.dtype, layout: str | int, parameter: Tensor | None) -> Tensor:
    """Return an empty tensor to load stored state into, with the stored layout on the parameter's current mesh."""
    if parameter is not None and size == parameter.shape:
        # Sharded like the parameter, whatever the stored layout.
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if not isinstance(parameter, DTensor) or layout == _PLAIN:
        return torch.empty(size, dtype=dtype)
    cut: Placement = Replicate()
    if isinstance(layout, int):
        cut = Shard(layout)
    # With replicas, the last dimension of the mesh is that of the shards.
    placements = [*[Replicate()] * (parameter.device_mesh.ndim - 1), cut]
    return empty(size, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)


def join(
    plain: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str],
) -> None:
    """Load plain values and tensors of the checkpoint at ``path`` into ``optimizer``, in its order of parameters.

    Raises:
        ValueError: the optimizer is of another class, or holds other parameters; names them.
    """
    names = names_of_parameters(model)
    held = [names.get(parameter, "?") for parameter in parameters_of(optimizer)]
    saved = _names_in(plain["param_groups"])
    if type(optimizer).__name__ != plain["class"] or set(held) != set(saved):
        differ = sorted(set(held) ^ set(saved))
        what = f"{plain['class']} in {path} does not match this {type(optimizer).__name__}"
        why = "their states are different"
        if differ:
            why = f"they differ in the parameters {', '.join(differ[:4])}"
        way_out = "Use the same optimizer, or load only the weights, with full_state_dict(folder)"
        raise ValueError(explain(what, why, way_out))
    numbers = dict(zip(held, itertools.count(), strict=False))
    now = optimizer.state_dict()["param_groups"]
    # A parameter's group decides its settings; the order within a group does not matter.
    if _sorted_names(groups_over(now, held.__getitem__)) != _sorted_names(plain["param_groups"]):
        what = f"{plain['class']} in {path} has {len(plain['param_groups'])} parameter groups"
        why = f"this one has {len(now)}, or groups the parameters differently"
        raise ValueError(explain(what, why, "Use the same parameter groups"))
    groups = [{**old, "params": group["params"]} for old, group in zip(plain["param_groups"], now, strict=True)]
    with as_corrupt(path):
        optimizer.load_state_dict({"state": _by_number(plain, tensors, numbers), "param_groups": groups})


def _sorted_names(groups: Groups) -> list[list[str]]:
    return [sorted(group["params"]) for group in groups]


def with_numbers(state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state of an optimizer as torch saves it, with numbers in place of the parameters' names."""
    numbers = dict(zip(_names_in(state["param_groups"]), itertools.count(), strict=False))
    groups = groups_over(state["param_groups"], numbers.__getitem__)
    return {"state": _by_number(state, tensors, numbers), "param_groups": groups}


def _by_number(
    plain: Mapping[str, Any], tensors: Mapping[str, Tensor], numbers: Mapping[str, int]
) -> dict[int, dict[str, Any]]:
    """Return the state of each parameter by its number, which ``numbers`` gives for its name."""
    state: dict[int, dict[str, Any]] = {}
    for path, value in {**plain["values"], **tensors}.items():
        name, _, key = path.rpartition("/")
        state.setdefault(numbers[name], {})[key] = value
    return state


def separate_averages(rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Split plain values from the tensors that callbacks keep for parameters under ``"by_parameter"``.

    Returns:
        The rest without these tensors; the tensors, by the parameter's name and the number of their dict; the keys that
        lead to each of these dicts, and each tensor's layout.

    Example:
        >>> rest, tensors, plain = separate_averages({"ema": {"by_parameter": {"weight": torch.ones(1)}, "steps": 1}})
        >>> rest, list(tensors), plain["keys"]
        ({'ema': {'by_parameter': {}, 'steps': 1}}, ['weight/0'], [['ema', 'by_parameter']])
    """
    tensors: dict[str, Tensor] = {}
    found = find_by_parameter(rest)
    for number, (keys, values) in enumerate(found):
        held, others = split_tensors(values)
        for name, value in held.items():
            tensors[f"{name}/{number}"] = value
        rest = replace_at(rest, keys, others)
    layout = {path: _layout(value) for path, value in tensors.items()}
    return rest, tensors, {"keys": [list(keys) for keys, _ in found], "layout": layout}


def join_averages(rest: dict[str, Any], plain: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the rest with the tensors of :func:`separate_averages`."""
    for path, tensor in tensors.items():
        name, _, number = path.rpartition("/")
        rest = replace_at(rest, (*plain["keys"][int(number)], name), tensor)
    return rest
