"""The optimizer that is to be sharded: made, or refused where it computes something else on pieces of layers."""

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
from lightning_fasttrain.optim.named.state_bytes import groups_of, state_bytes

MakeOptimizer = Callable[[Any], Optimizer]

_FOREIGN = ("bitsandbytes", "deepspeed")  # their kernels know no DTensor, which FSDP2's parameters are
_BY_LAYER = ("lamb", "lars")  # a norm of each layer scales its update, which no state shows
_PROBE = (64, 128)  # large enough that bitsandbytes does not fall back to 32 bits


def make_optimizer(module: nn.Module, optimizer: Optimizer | MakeOptimizer | None) -> Optimizer:
    """The optimizer itself, or the one that the function or the LightningModule ``module`` (fake tensors) makes.

    Raises:
        TypeError: there is neither an optimizer nor a LightningModule, or what was made is none.
        ValueError: the LightningModule has several.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, NamedOptimizer):
        return optimizer(module)  # which parameters get what depends on their names
    way_out = "Give an optimizer, or a function: lambda parameters: torch.optim.AdamW(parameters)"
    if optimizer is not None:
        # On "meta" and not of fake tensors: some make tables when constructed, and need numbers for that.
        made = optimizer([_make_meta(parameter) for parameter in module.parameters()])
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


def unfit_family(optimizer: Optimizer) -> tuple[str, str]:
    """``"zero"`` or ``"fsdp2"`` if ``optimizer`` does not work under those strategies, and a line that says why.

    Raises:
        ValueError: it works under neither.
    """
    kind = type(optimizer)
    if issubclass(kind, MuonAdamW | Muon):  # FSDP2 cuts matrices in rows, which it puts together
        return "zero", f"ZeRO is left out: {kind.__name__} needs whole matrices, and ZeRO gives it flat pieces."
    refuse_unshardable(optimizer)
    if any(base.__module__.split(".")[0] in _FOREIGN for base in kind.__mro__):
        return "fsdp2", f"FSDP2 is left out: the kernels of {kind.__name__} do not work on its parameters."
    return "", ""


def _unshardable_because(optimizer: Optimizer) -> str | None:
    if isinstance(optimizer, HostOptimizer):
        return "its copy of the weights in host memory would be that of whole layers"
    if any(word in type(optimizer).__name__.lower() for word in _BY_LAYER):
        return "it scales each layer's update by that layer's norm"
    for group in groups_of(optimizer):
        try:
            # What can be cut anywhere keeps as much for a matrix as for its numbers in a row.
            in_shape, flat = (state_bytes(optimizer, group, [s], torch.float32) for s in (_PROBE, (math.prod(_PROBE),)))
        except ValueError as error:
            return f"it makes no step on a piece of a layer ({error.__cause__})"
        if in_shape != flat:
            return "what it keeps depends on the shape of a matrix"
    return None


def _make_meta(parameter: Tensor) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, parameter.requires_grad)


def optimizer_named(name: str) -> MakeOptimizer:
    """What makes the optimizer of that name: one of :func:`~lightning_fasttrain.build_optimizer`, or one of the classes
    in torch or bitsandbytes; ``"sgd-momentum"`` is SGD with it.

    Raises:
        ValueError: there is none.

    Example:
        >>> optimizer_named("nadam")([nn.Parameter(torch.zeros(2))]).defaults["betas"]
        (0.9, 0.999)
    """
    if is_known(name):
        return NamedOptimizer(name)
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
