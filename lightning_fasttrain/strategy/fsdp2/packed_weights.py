"""Sharding of 4-bit weights as bytes; their quantization constants stay replicated on every rank."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from lightning_fasttrain.finetune.quantized.quantized_layer import in_8_bits, is_quantized, settle_4bit_
from lightning_fasttrain.finetune.quantized.quantized_tensor import keep_quantized_


def is_opaque(parameter: Tensor) -> bool:
    """Return whether a parameter must not be cast: it is not floating-point, or is frozen and of its own class."""
    if isinstance(parameter, DTensor):
        return not parameter.is_floating_point()
    own_class = type(parameter) is not nn.Parameter and not parameter.requires_grad
    return own_class or not parameter.is_floating_point()


def find_packed(model: nn.Module, policy: MixedPrecisionPolicy) -> dict[nn.Parameter, list[nn.Module]]:
    """Map each 4-bit weight that can be sharded to the layers that use it."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not is_quantized(layer) or in_8_bits(layer) or _would_be_cast(weight, policy):
            continue
        found.setdefault(weight, []).append(layer)
    return found


def _would_be_cast(weight: Tensor, policy: MixedPrecisionPolicy) -> bool:
    """Return whether FSDP2 would cast the packed bytes of a weight as if they were values.

    It casts weights that are stored in a floating-point dtype, and torch 2.11 casts all. A weight that is stored in
    the policy's own dtype is never cast; ``quant_storage`` of bitsandbytes sets the storage dtype for that purpose.
    """
    if policy.param_dtype in (None, weight.dtype):
        return False
    return weight.is_floating_point() or TorchVersion(torch.__version__) < "2.12"


def whole_parameters(model: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Return the quantised parameters that stay unsharded on every rank: all except shardable 4-bit weights."""
    packed = find_packed(model, policy)
    return {parameter for parameter in model.parameters() if is_opaque(parameter) and parameter not in packed}


def unwrap_packed_(model: nn.Module, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Convert 4-bit weights to plain parameters, which ``fully_shard`` can shard; call it before.

    Returns:
        The layers of these weights, for :func:`keep_packed_`, which is to be called after sharding.
    """
    unwrapped = []
    for weight, layers in find_packed(model, policy).items():
        plain = nn.Parameter(weight.detach().as_subclass(Tensor), requires_grad=False)
        for layer in layers:
            keep_quantized_(layer)
            layer._parameters["weight"] = plain
            unwrapped.append(layer)
    return unwrapped


def keep_packed_(layers: list[nn.Module], groups: Iterable[nn.Module]) -> None:
    """Attach the quantization constants to sharded weights when they are saved, loaded and used.

    FSDP2 replaces parameters by its own. A gathered parameter is converted to bitsandbytes' class before its group's
    forward, outside of compiled code, and again by the layer itself where blocks are recomputed. A shard needs its
    constants for the keys of ``state_dict`` only.

    Args:
        layers: the result of :func:`unwrap_packed_`.
        groups: the modules that were sharded separately, the root last.
    """
    for layer in layers:
        settle_4bit_(layer)
        # ``model.to`` drops attributes of the parameter.
        layer.register_state_dict_pre_hook(settle_4bit_)
    # From the inside out, the root last: a layer belongs to the first group that contains it.
    left = dict.fromkeys(layers)
    for group in groups:
        own = [module for module in group.modules() if module in left]
        for layer in own:
            del left[layer]
        if own:
            group.register_forward_pre_hook(_settle(own))


def _settle(layers: list[nn.Module]) -> Callable[..., None]:
    def settle(*_: object) -> None:
        for layer in layers:
            settle_4bit_(layer)

    return settle
