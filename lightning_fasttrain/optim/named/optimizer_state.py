"""The state of optimizers: its size, measured on tensors without memory, and quantized state saved as plain tensors."""

import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer

Shape = tuple[int, ...]

# Compiled code without fake-tensor support: number of float32 state tensors, each as large as the parameter.
_COMPILED = {
    "FusedAdam": 2,
    "DeepSpeedCPUAdam": 2,
    "ZenFlowCPUAdam": 2,
    "FusedLion": 1,
    "DeepSpeedCPULion": 1,
    "DeepSpeedCPUAdagrad": 1,
}


@check_arguments
def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state that ``optimizer`` has once each trainable parameter has had a gradient, on all
    devices.

    They are measured rather than computed by a formula: the optimizer's own step runs on tensors without memory. So
    every optimizer is supported whose step is code that PyTorch can trace, and bitsandbytes'. For a
    :class:`HostOptimizer` it is the state in host memory. The optimizer is unchanged, and no memory is allocated.

    Args:
        optimizer: an optimizer over parameters that are real, or on ``"meta"``.

    Returns:
        The number of bytes. Tensors that several parameters share, such as tables of 8-bit states, count once per
        group.

    Raises:
        ValueError: no parameter is trainable, or its step needs more than gradients.

    Example:
        >>> with torch.device("meta"):
        ...     net = nn.Linear(1000, 1000, bias=False)
        >>> optimizer_state_bytes(torch.optim.AdamW(net.parameters()))  # 2 · 4 · 1000², and 4 for the count of steps
        8000004

    Source:
        This function is our own; checked against the tensors of each optimizer after a step.
    """
    if isinstance(optimizer, HostOptimizer):
        return optimizer_state_bytes(optimizer.on_host())
    return sum(state_bytes(optimizer, group, group.shapes, group.dtype) for group in groups_of(optimizer))


@dataclass(frozen=True)
class Group:
    """The trainable parameters of one group of an optimizer.

    Args:
        settings: the group's settings, without ``"params"``.
        shapes: shapes of its parameters, in order.
        dtype: dtype of the first parameter.
    """

    settings: dict[str, Any]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))


def groups_of(optimizer: Optimizer) -> list[Group]:
    """Return the groups of ``optimizer`` with trainable parameters.

    Raises:
        ValueError: there are none.
    """
    groups = []
    for group in optimizer.param_groups:
        settings = dict(group)
        trained = [parameter for parameter in settings.pop("params") if parameter.requires_grad]
        if trained:
            groups.append(Group(settings, tuple(tuple(p.shape) for p in trained), trained[0].dtype))
    if not groups:
        why, way_out = "none of its parameters requires a gradient", "Pass it trainable parameters"
        raise ValueError(explain(f"{type(optimizer).__name__} without trainable parameters", why, way_out))
    return groups


def state_bytes(optimizer: Optimizer, group: Group, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Return the bytes of state that ``optimizer`` keeps for parameters of these shapes; it is unchanged.

    Args:
        optimizer: the optimizer whose class and attributes are used.
        group: the group whose settings are used.
        shapes: shapes of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: its step needs more than gradients.
    """
    kind, times = type(optimizer), Counter(shapes)
    if kind.__module__.startswith("deepspeed") and kind.__name__ in _COMPILED:
        return 4 * _COMPILED[kind.__name__] * sum(map(math.prod, shapes))
    with FakeMode(), _Ones():
        # Two of each shape distinguish per-parameter state from common state, such as a table.
        two = [shape for shape, n in times.items() for _ in range(min(n, 2))]
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in two]
        state = _state_after_a_step(optimizer, group, parameters)
    kept = []
    for parameter in parameters:
        kept.append({id(tensor): tensor.nbytes for tensor in tensors_in(state[parameter])})
    uses = Counter(chain.from_iterable(kept))  # used by more than one parameter: a common table
    common, own = dict[int, int](), dict[Shape, int]()
    for shape, tensors in zip(two, kept, strict=True):
        own[shape] = 0
        for key, nbytes in tensors.items():
            if uses[key] > 1:
                common[key] = nbytes
            else:
                own[shape] += nbytes
    return sum(own[shape] * n for shape, n in times.items()) + sum(common.values())


def _state_after_a_step(optimizer: Optimizer, group: Group, parameters: list[nn.Parameter]) -> dict[Any, Any]:
    """Return the state that a copy of the optimizer holds for these parameters."""
    kind, twin = type(optimizer), make_twin(optimizer)
    # These need a device, but keep the same state.
    switches = dict.fromkeys({"fused", "foreach", "capturable"} & group.settings.keys(), False)
    twin.state = early_state(kind, parameters)
    twin.param_groups = [{**group.settings, **switches, "params": parameters}]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        # torchao compiles its step, which fake tensors do not support.
        with torch.compiler.set_stance("force_eager"):
            twin.step()
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        why, way_out = f"its step fails on tensors without values ({error})", "Use AdamW, SGD, Lion or AdamW8bit"
        raise ValueError(explain(kind.__name__, why, way_out)) from error
    return twin.state


def make_twin(optimizer: Optimizer) -> Any:
    """Return an optimizer with the same attributes and no hooks, whose groups and state the caller replaces."""
    twin: Any = type(optimizer).__new__(type(optimizer))  # without ``__init__``, whose arguments vary
    # Containers are copied, so that a step's changes in them do not reach the original.
    for name, value in vars(optimizer).items():
        vars(twin)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    # Schedules replace the step with one that is bound to the original. A twin steps on this rank alone.
    vars(twin).pop("step", None)
    vars(twin).pop("divide", None)
    vars(twin).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    return twin


def tensors_in(state: object) -> Iterator[Tensor]:
    """Yield the tensors of a state; for quantized ones, their components."""
    for tensor in tree_iter(state):
        if not isinstance(tensor, Tensor):
            continue
        if is_traceable_wrapper_subclass(tensor):
            yield from tensors_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


def early_state(kind: type[Optimizer], parameters: list[nn.Parameter]) -> defaultdict[Any, Any]:
    """Return the optimizer state that exists before its first step, as in torch 2.11's Adagrad."""
    if kind is not torch.optim.Adagrad:
        return defaultdict(dict)
    return defaultdict(dict, kind(parameters).state)


class _Ones(TorchDispatchMode):
    """Returns 1 where code reads a scalar from a tensor, as Adafactor does with its step count."""

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **(kwargs or {}))


_BLOCK = 256  # elements that share a scale in bitsandbytes' states
_OF_BITSANDBYTES = {"exp_avg": "1", "exp_avg_sq": "2"}


def save_as_plain_tensors_(optimizer: Optimizer) -> None:
    """Make the ``state_dict`` of torchao's optimizers hold plain tensors: Lightning's loader refuses tensor
    subclasses. Copies of the optimizer do so too, since torchao's state in 4 bits cannot be copied itself."""
    optimizer.register_state_dict_post_hook(lambda _, saved: _map_values(saved, _parts))
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: _map_values(loaded, _rebuild))
    vars(optimizer)["__deepcopy__"] = _Copies(optimizer)


class _Copies:
    """Replaces ``__deepcopy__`` of one of torchao's optimizers; the default also loses its settings."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, memo: dict[int, Any]) -> Optimizer:
        twin = make_twin(self.optimizer)
        memo[id(self.optimizer)] = twin
        twin.param_groups = copy.deepcopy(self.optimizer.param_groups, memo)
        twin.state = defaultdict(dict)
        for parameter, state in self.optimizer.state.items():
            values = {key: _rebuild(copy.deepcopy(_parts(value), memo)) for key, value in state.items()}
            twin.state[copy.deepcopy(parameter, memo)] = values
        vars(twin)["__deepcopy__"] = _Copies(twin)  # it has the other's hooks
        return twin


def _quantized_states() -> dict[str, Any]:
    """Return the classes of torchao's quantized state, by name."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    return {"OptimState4bit": OptimState4bit, "OptimState8bit": OptimState8bit}


def _map_values(state_dict: Mapping[str, object], convert: Callable[[Any], object]) -> dict[str, Any]:
    converted = {}
    for number, state in state_dict["state"].items():
        converted[number] = {key: convert(value) for key, value in state.items()}
    return {**state_dict, "state": converted}


def _parts(value: object) -> Any:
    if not isinstance(value, tuple(_quantized_states().values())):
        return value
    names, (signed, shape, dtype) = value.__tensor_flatten__()  # type: ignore[misc]
    parts = {name: getattr(value, name) for name in names}
    made_of = {"class": type(value).__name__, "signed": signed, "shape": list(shape), "dtype": str(dtype)}
    return {**parts, **made_of}


def _rebuild(value: object) -> Any:
    if not isinstance(value, dict) or value.get("class") not in _quantized_states():
        return value
    kind = _quantized_states()[value["class"]]
    attributes = [value["signed"], tuple(value["shape"]), getattr(torch, value["dtype"].removeprefix("torch."))]
    return kind(*(value[part] for part in kind.tensor_attrs), *attributes)


@check_arguments
def hand_over_state_(source: Optimizer, target: Optimizer) -> int:
    """Copy one optimizer's state to another of the same family over the same parameters, in any precision.

    Supported are AdamW and its 8-bit, 4-bit, paged and offloaded forms, and Lion and its forms. Step counts are exact;
    moments are rounded if the target has fewer bits, and dequantized if the source does. Groups and learning rates are
    unchanged. To use another optimizer's checkpoint, load it into such an optimizer first.

    Args:
        source: an optimizer that has taken steps.
        target: the optimizer whose state is replaced.

    Returns:
        The number of parameters with state.

    Raises:
        ValueError: ``source`` has no state, parameters differ, or the two keep different kinds of state.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(8))
        >>> first, second = torch.optim.AdamW([weight]), torch.optim.Adam([weight])
        >>> weight.grad = torch.ones(8)
        >>> first.step()
        >>> hand_over_state_(first, second), second.state[weight]["step"].item()
        (1, 1.0)

    Source:
        This function is our own; the quantized formats, and the code that rounds, are bitsandbytes' and torchao's.
    """
    held, places = _places_of(source), _places_of(target)
    states: dict[Tensor, dict[str, Any]] = {}
    for parameter, (optimizer, tensor) in held.items():
        if optimizer.state.get(tensor):
            states[parameter] = optimizer.state[tensor]
    unknown = states.keys() - places.keys()
    if not states or unknown:
        what = f"{type(source).__name__} → {type(target).__name__}: {len(unknown)} parameters of the first are unknown"
        why = "state belongs to parameters" if unknown else "the first has taken no step"
        raise ValueError(explain(what, why, "Create both for the same model, and load the first's checkpoint"))
    moments = {parameter: _read(state, type(source).__name__) for parameter, state in states.items()}
    with torch.no_grad():
        for parameter, values in moments.items():
            _write(places[parameter][0], places[parameter][1], values)
    return len(moments)


def _places_of(optimizer: Optimizer) -> dict[Tensor, tuple[Optimizer, Tensor]]:
    """Map each parameter to the optimizer and the tensor that hold its state."""
    parameters = holders = parameters_of(optimizer)
    if isinstance(optimizer, HostOptimizer):
        optimizer = optimizer.on_host()
        holders = parameters_of(optimizer)
    return {parameter: (optimizer, holder) for parameter, holder in zip(parameters, holders, strict=True)}


def _read(state: dict[str, Any], source: str) -> dict[str, Any]:
    """Return step and moments, in float32."""
    values: dict[str, Any] = {}
    if "step" in state:  # Lion has none
        values["step"] = int(state["step"])
    for name, digit in _OF_BITSANDBYTES.items():
        value = state.get(name, state.get(f"state{digit}"))
        if value is None:
            continue
        if f"absmax{digit}" in state:
            bnb: Any = require("bitsandbytes.functional", extra="finetune")
            scales, table = state[f"absmax{digit}"], state[f"qmap{digit}"]
            value = bnb.dequantize_blockwise(value, absmax=scales, code=table, blocksize=_BLOCK)
        values[name] = value.dequantize() if is_traceable_wrapper_subclass(value) else value.float()
    if "exp_avg" not in values:
        why = f"it holds {', '.join(map(str, state))}, which the other does not support"
        raise ValueError(explain(f"the state of {source}", why, "Start with a fresh optimizer"))
    return values


def _write(optimizer: Optimizer, parameter: Tensor, values: dict[str, Any]) -> None:
    made = _fresh_state(optimizer, parameter)
    keeps_two, has_two = "exp_avg_sq" in made or "state2" in made, "exp_avg_sq" in values
    if keeps_two != has_two:
        why = "one keeps a mean of squares, the other does not"
        raise ValueError(explain(f"state for {type(optimizer).__name__}", why, "Start with a fresh optimizer"))
    for name, digit in _OF_BITSANDBYTES.items():
        value, ours = values.get(name), made.get(name, made.get(f"state{digit}"))
        if value is None or ours is None:
            continue
        if f"absmax{digit}" in made:
            bnb: Any = require("bitsandbytes.functional", extra="finetune")
            scales, table = made[f"absmax{digit}"], made[f"qmap{digit}"]
            bnb.quantize_blockwise(value.to(ours.device), code=table, absmax=scales, out=ours, blocksize=_BLOCK)
        else:
            ours.copy_(value)
    if "step" in made:
        count = made["step"]
        made["step"] = count.fill_(values.get("step", 0)) if isinstance(count, Tensor) else values.get("step", 0)
    optimizer.state[parameter] = made


def _fresh_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer creates in its first step, without a step."""
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    stand_in = torch.nn.Parameter(parameter.detach().clone())
    stand_in.grad = torch.zeros_like(stand_in)  # zero gradients give zero moments
    twin = make_twin(optimizer)
    twin.param_groups, twin.state = [{**group_of[parameter], "params": [stand_in]}], defaultdict(dict)
    # Compiling the optimizer for one step would take minutes.
    with torch.compiler.set_stance("force_eager"):
        twin.step()
    return twin.state[stand_in]
