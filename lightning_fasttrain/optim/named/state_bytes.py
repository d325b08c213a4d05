"""Size of an optimizer's state for parameters of given shapes, measured in one step on tensors without memory."""

import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
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
    with FakeTensorMode(allow_non_fake_inputs=True), _Ones():
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
