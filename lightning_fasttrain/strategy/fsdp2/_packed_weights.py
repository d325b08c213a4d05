"""Weights in 4 bits, cut over the ranks as bytes; the constants that belong to them stay whole beside them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from lightning_fasttrain.finetune.quantized._quantized_layer import in_8_bits, is_quantized, settle_4bit_
from lightning_fasttrain.finetune.quantized.quantized_state import keep_quantized_


def is_opaque(parameter: Tensor) -> bool:
    """Whether the bytes of a parameter are no numbers to be cast: it is no float, or frozen and of its own class."""
    if isinstance(parameter, DTensor):
        return not parameter.is_floating_point()
    own_class = type(parameter) is not nn.Parameter and not parameter.requires_grad
    return own_class or not parameter.is_floating_point()


def find_packed(model: nn.Module, policy: MixedPrecisionPolicy) -> dict[nn.Parameter, list[nn.Module]]:
    """Weights in 4 bits that can be cut → the layers that use each."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not is_quantized(layer) or in_8_bits(layer) or _would_be_cast(weight, policy):
            continue
        found.setdefault(weight, []).append(layer)
    return found


def _would_be_cast(weight: Tensor, policy: MixedPrecisionPolicy) -> bool:
    """Whether FSDP2 takes bytes for numbers, as it does with those that are stored as floats, and torch 2.11 with all.

    A weight that is stored in the very dtype of the policy is never cast, which is what ``quant_storage`` is for.
    """
    if policy.param_dtype in (None, weight.dtype):
        return False
    return weight.is_floating_point() or TorchVersion(torch.__version__) < "2.12"


def whole_parameters(model: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """The quantised parameters that stay whole on every rank: all but weights in 4 bits."""
    packed = find_packed(model, policy)
    return {parameter for parameter in model.parameters() if is_opaque(parameter) and parameter not in packed}


def unwrap_packed_(model: nn.Module, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Make plain parameters of the weights in 4 bits, which ``fully_shard`` can cut; call it before.

    Returns:
        Their layers, for :func:`keep_packed_` to be called after.
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
    """Let sharded weights have their constants, as whole ones do, when they are saved, loaded and used.

    FSDP2 replaces parameters by its own. What it has gathered is made a weight of bitsandbytes' before
    its group's forward, where no compiler looks, and again by the layer itself where blocks are recomputed. What is cut
    needs its constants for the keys of ``state_dict`` only.

    Args:
        layers: of :func:`unwrap_packed_`.
        groups: the modules that were sharded on their own, the root last.
    """
    for layer in layers:
        settle_4bit_(layer)
        layer.register_state_dict_pre_hook(settle_4bit_)  # ``model.to`` forgets what was on the parameter
    # From the inside out, the root last: a layer belongs to the first group that has it.
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
