"""What an optimizer keeps about parameters of given shapes, learnt from one step on tensors that have no memory."""

import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_fasttrain._checks import require
from lightning_fasttrain._host import configured_optimizers
from lightning_fasttrain._messages import explain

MakeOptimizer = Callable[[Any], Optimizer]
Shape = tuple[int, ...]

# Compiled code, which knows no fake tensors: state tensors of float32, each as large as the parameter.
_COMPILED = {
    "FusedAdam": 2,
    "DeepSpeedCPUAdam": 2,
    "ZenFlowCPUAdam": 2,
    "FusedLion": 1,
    "DeepSpeedCPULion": 1,
    "DeepSpeedCPUAdagrad": 1,
}
_BY_LAYER = ("lamb", "lars")  # a norm of each layer scales its update, which no state shows
_PROBE = (64, 128)  # large enough that bitsandbytes does not fall back to 32 bits


@dataclass(frozen=True)
class Group:
    """One group of an optimizer's parameters: those that train.

    Args:
        settings: of the group, ``"params"`` left out.
        shapes: of its parameters, in order.
        dtype: of the first.
    """

    settings: dict[str, Any]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def optimizer_of(module: nn.Module, optimizer: Optimizer | MakeOptimizer | None) -> Optimizer:
    """The optimizer itself, or the one that the function or the LightningModule ``module`` (fake tensors) makes.

    Raises:
        TypeError: there is neither an optimizer nor a LightningModule, or what was made is none.
        ValueError: the LightningModule has several.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    way_out = "Give an optimizer, or a function: lambda parameters: torch.optim.AdamW(parameters)"
    if optimizer is not None:
        # On "meta" and not of fake tensors: some make tables when constructed, and need numbers for that.
        made = optimizer([_meta(parameter) for parameter in module.parameters()])
        if not isinstance(made, Optimizer):
            what = f"optimizer={optimizer!r}, which gives {type(made).__name__}"
            raise TypeError(explain(what, "an optimizer is needed", way_out))
        return made
    if not isinstance(module, L.LightningModule):
        why = "only a LightningModule has configure_optimizers"
        raise TypeError(explain(f"{type(module).__name__} without optimizer", why, way_out))
    optimizers = configured_optimizers(module)
    if len(optimizers) != 1:
        what = f"{type(module).__name__} with {len(optimizers)} optimizers"
        raise ValueError(explain(what, "engines that shard know one", "Give the one to be sharded as optimizer="))
    return optimizers[0]


def groups_of(optimizer: Optimizer) -> list[Group]:
    """The groups of ``optimizer`` in which anything trains.

    Raises:
        ValueError: nothing trains.
    """
    groups = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        if trained:
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append(Group(settings, tuple(tuple(p.shape) for p in trained), trained[0].dtype))
    if not groups:
        why, way_out = "none of its parameters requires a gradient", "Give it those that are to train"
        raise ValueError(explain(f"{type(optimizer).__name__} trains nothing", why, way_out))
    return groups


def state_bytes(optimizer: Optimizer, group: Group, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Bytes of state that ``optimizer`` keeps about parameters of these shapes; it is left as it is.

    Args:
        optimizer: whose class and attributes count.
        group: whose settings count.
        shapes: of the parameters it is asked about.
        dtype: of these.

    Raises:
        ValueError: its step needs more than gradients.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed") and kind.__name__ in _COMPILED:
        return 4 * _COMPILED[kind.__name__] * sum(math.prod(shape) for shape in shapes)
    # Containers are copied, so that what a step notes in them is not noted in the original.
    attributes: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        attributes[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    attributes.pop("step", None)  # schedules put their own in its place, which is bound to the original
    attributes |= {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}
    # These need a device; what they keep is the same.
    switches = {name: False for name in ("fused", "foreach", "capturable") if name in group.settings}
    twin = kind.__new__(kind)
    with FakeTensorMode(allow_non_fake_inputs=True), _Ones():
        # Two of each shape tell what is kept about every one and what, like a table, about all together.
        times = Counter(shapes)
        parameters = [nn.Parameter(torch.empty(s, dtype=dtype)) for s, n in times.items() for _ in range(min(n, 2))]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        vars(twin).update(attributes, state=_early_state(kind, parameters))
        twin.param_groups = [{**group.settings, **switches, "params": parameters}]
        try:
            twin.step()
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            why, way_out = f"it makes no step on tensors without numbers ({error})", "Use AdamW, SGD, Lion or AdamW8bit"
            raise ValueError(explain(kind.__name__, why, way_out)) from error
    kept = []
    for parameter in parameters:
        held = tree_iter(twin.state[parameter])
        kept.append({id(tensor): tensor.nbytes for tensor in held if isinstance(tensor, Tensor)})
    uses = Counter(key for tensors in kept for key in tensors)
    common = {key: nbytes for tensors in kept for key, nbytes in tensors.items() if uses[key] > 1}
    own = {}
    for parameter, tensors in zip(parameters, kept, strict=True):
        own[parameter.shape] = sum(nbytes for key, nbytes in tensors.items() if uses[key] == 1)
    return sum(own[torch.Size(shape)] * n for shape, n in times.items()) + sum(common.values())


def _early_state(kind: type[Optimizer], parameters: list[nn.Parameter]) -> defaultdict[Any, Any]:
    """What it keeps before its first step: torch 2.11's Adagrad does; others make all in that step."""
    return defaultdict(dict, kind(parameters).state if kind is torch.optim.Adagrad else {})


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Refuse an optimizer that computes something else when parameters are laid end to end and cut in parts.

    Raises:
        ValueError: it does.
    """
    name = type(optimizer).__name__
    why = _unshardable_because(optimizer)
    if why is not None:
        way_out = "Use an optimizer that treats each number alike (AdamW, SGD, Lion, AdamW8bit), or DDP (stage 0)"
        raise ValueError(explain(f"{name} with ZeRO", f"{why}, and ZeRO gives it flat pieces of many layers", way_out))


def _unshardable_because(optimizer: Optimizer) -> str | None:
    if any(word in type(optimizer).__name__.lower() for word in _BY_LAYER):
        return "it scales each layer's update by that layer's norm"
    for group in groups_of(optimizer):
        try:
            in_shape, flat = (state_bytes(optimizer, group, [s], torch.float32) for s in (_PROBE, (math.prod(_PROBE),)))
        except ValueError as error:
            return f"it makes no step on a piece of a layer ({error.__cause__})"
        if in_shape != flat:
            return "what it keeps depends on the shape of a matrix"
    return None


class _Ones(TorchDispatchMode):
    """Reads 1 where code wants a number out of a tensor, as Adafactor does of its count of steps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **(kwargs or {}))


def _meta(parameter: Tensor) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, parameter.requires_grad)


def optimizer_named(name: str) -> MakeOptimizer:
    """What makes the optimizer of that name of parameters, in torch or bitsandbytes; ``"sgd-momentum"`` is SGD with it.

    Raises:
        ValueError: there is none.

    Example:
        >>> optimizer_named("adamw")([nn.Parameter(torch.zeros(2))]).defaults["betas"]
        (0.9, 0.999)
    """
    momentum = {"momentum": 0.9} if name.lower() in ("sgd-momentum", "sgd8bit") else {}
    wanted = name.lower().removesuffix("-momentum")
    places = [torch.optim, require("bitsandbytes", extra="finetune").optim] if wanted.endswith("bit") else [torch.optim]
    for place in places:
        for key, kind in vars(place).items():
            if key.lower() == wanted and isinstance(kind, type) and issubclass(kind, Optimizer):
                make: Any = kind
                return lambda parameters: make(parameters, lr=1e-3, **momentum)
    why = "neither torch.optim nor bitsandbytes has one of this name"
    raise ValueError(explain(f"optimizer={name!r}", why, "Use adamw, sgd, sgd-momentum, lion8bit or adamw8bit"))
