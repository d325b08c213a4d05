"""Build the optimizer that is to be sharded, and refuse optimizers whose update differs on shards."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.host.lightning import configured_optimizers
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.optim.named.build_optimizer import NamedOptimizer, is_known
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.optim.named.muon import MuonAdamW
from lightning_fasttrain.optim.named.optimizer_state import groups_of, state_bytes

MakeOptimizer = Callable[[Any], Optimizer]

# A norm of each layer scales its update, which the state does not show.
_BY_LAYER = ("lamb", "lars")
_PROBE = (64, 128)  # large enough that bitsandbytes does not fall back to 32 bits


def make_optimizer(module: nn.Module, optimizer: Optimizer | MakeOptimizer | None) -> Optimizer:
    """Return the optimizer, or build it with the given function or with the LightningModule's own method.

    Raises:
        TypeError: there is neither an optimizer nor a LightningModule, or the function did not return an optimizer.
        ValueError: the LightningModule has several optimizers.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, NamedOptimizer):
        # Its parameter groups depend on the names of the parameters.
        return optimizer(module)
    way_out = "Give an optimizer, or a function: lambda parameters: torch.optim.AdamW(parameters)"
    if optimizer is not None:
        # On "meta" instead of fake tensors: some optimizers build lookup tables when constructed, which need values.
        made = optimizer(list(map(_make_meta, module.parameters())))
        if not isinstance(made, Optimizer):
            what = f"optimizer={optimizer!r}, which gives {type(made).__name__}"
            raise TypeError(explain(what, "an optimizer is needed", way_out))
        return made
    if not isinstance(module, L.LightningModule):
        why = "only a LightningModule has configure_optimizers"
        raise TypeError(explain(f"{type(module).__name__} without optimizer", why, way_out))
    optimizers, _ = configured_optimizers(module)
    if len(optimizers) != 1:
        what = f"{type(module).__name__} with {len(optimizers)} optimizers"
        raise ValueError(explain(what, "a sharding engine supports one", "Give the one to be sharded as optimizer="))
    return optimizers[0]


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update changes when parameters are flattened and sharded.

    Raises:
        ValueError: the optimizer's update would change; says why.
    """
    name = type(optimizer).__name__
    why = _unshardable_because(optimizer)
    if why is not None:
        way_out = "Use an elementwise optimizer (AdamW, SGD, Lion, AdamW8bit), or DDP (stage 0)"
        raise ValueError(explain(f"{name} with ZeRO", f"{why}, and ZeRO gives it flat shards of many layers", way_out))


def unfit_family(optimizer: Optimizer) -> tuple[str, str]:
    """Return ``"zero"`` or ``"fsdp2"`` if ``optimizer`` does not work under those strategies, and the reason.

    Raises:
        ValueError: the optimizer works under neither.
    """
    kind = type(optimizer)
    # FSDP2 shards matrices by rows, which the optimizer gathers.
    if issubclass(kind, MuonAdamW | Muon):
        return "zero", f"ZeRO is left out: {kind.__name__} needs whole matrices, and ZeRO gives it flat shards."
    refuse_unshardable(optimizer)
    if has_own_kernels(optimizer):
        return "fsdp2", f"FSDP2 is left out: the kernels of {kind.__name__} do not work on its parameters."
    return "", ""


def has_own_kernels(optimizer: Optimizer) -> bool:
    """Return whether bitsandbytes or DeepSpeed steps, whose kernels do not support DTensor, FSDP2's parameters."""
    return any(base.__module__.partition(".")[0] in ("bitsandbytes", "deepspeed") for base in type(optimizer).__mro__)


def _unshardable_because(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, HostOptimizer):
        return "its copy of the weights in host memory would be that of whole layers"
    if any(word in type(optimizer).__name__.lower() for word in _BY_LAYER):
        return "it scales each layer's update by that layer's norm"
    for group in groups_of(optimizer):
        try:
            # An elementwise optimizer keeps as much state for a matrix as for the same matrix flattened.
            in_shape = state_bytes(optimizer, group, [_PROBE], torch.float32)
            flat = state_bytes(optimizer, group, [(math.prod(_PROBE),)], torch.float32)
        except ValueError as error:
            return f"it makes no step on a shard of a layer ({error.__cause__})"
        if in_shape != flat:
            return "its state depends on the shape of a matrix"
    return None


def _make_meta(parameter: Tensor) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, parameter.requires_grad)


def optimizer_named(name: str) -> MakeOptimizer:
    """Return a function of the parameters that builds the optimizer of that name.

    The name is one that :func:`~lightning_fasttrain.build_optimizer` knows, or a class in torch or bitsandbytes;
    ``"sgd-momentum"`` is SGD with momentum 0.9.

    Raises:
        ValueError: there is no optimizer of that name.

    Example:
        >>> optimizer_named("nadam")([nn.Parameter(torch.zeros(2))]).defaults["betas"]
        (0.9, 0.999)
    """
    if is_known(name):
        return NamedOptimizer(name)
    momentum = {}
    if name.lower() in ("sgd-momentum", "sgd8bit"):
        momentum["momentum"] = 0.9
    wanted = name.lower().removesuffix("-momentum")
    places = [torch.optim]
    if wanted.endswith("bit"):
        places.append(require("bitsandbytes", extra="finetune").optim)
    for place in places:
        for key, kind in vars(place).items():
            if key.lower() == wanted and isinstance(kind, type) and issubclass(kind, Optimizer):
                make: Any = kind
                return lambda parameters: make(parameters, lr=1e-3, **momentum)
    why = "neither torch.optim nor bitsandbytes has an optimizer of this name"
    raise ValueError(explain(f"optimizer={name!r}", why, "Use adamw, sgd, sgd-momentum, lion8bit or adamw8bit"))
