"""Find the layers of residual branches: their last projections, the norms that end them, values and MLPs."""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lightning_fasttrain.architecture.search.find_mlps import ATTENTION, find_mlps, sizes_of
from lightning_fasttrain.core.modules.select import CONV1D, has_parameters, is_a, is_inside, is_linear

_CROSS = re.compile("cross|encoder_attn|encdec|multihead_attn", re.IGNORECASE)
_SHORTCUT = re.compile("downsample|shortcut|skip", re.IGNORECASE)


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer: its weight, or the part of it that computes the values of attention.

    Args:
        name: qualified name of the parameter.
        weight: the parameter, or a view of some of its rows or columns.
    """

    name: str
    weight: Tensor


def find_attentions(block: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of a block that are attention by their names.

    Example:
        >>> list(find_attentions(nn.TransformerDecoderLayer(4, 2)))
        ['self_attn', 'multihead_attn']
    """
    found: dict[str, nn.Module] = {}
    for name, module in block.named_modules():
        if ATTENTION.search(name.rpartition(".")[2]) and not is_inside(name, found):
            found[name] = module
    return {name: module for name, module in found.items() if list_linear(module)}


def has_cross_attention(block: nn.Module) -> bool:
    """Whether one of the attentions of a block reads another sequence, by its name."""
    return any(map(_CROSS.search, find_attentions(block)))


def list_linear(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a module by name, with the output layer of ``nn.MultiheadAttention``."""
    output = nn.modules.linear.NonDynamicallyQuantizableLinear
    return {name: part for name, part in module.named_modules() if is_linear(part) or isinstance(part, output)}


def find_projections(block: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that write into the residual stream: the last of each attention and MLP, or convolution.

    Example:
        >>> list(find_projections(nn.TransformerEncoderLayer(4, 2, dim_feedforward=16)))
        ['self_attn.out_proj', 'linear2']
    """
    found: dict[str, nn.Module] = {}
    for name, attention in find_attentions(block).items():
        last, layer = list(list_linear(attention).items())[-1]
        found[f"{name}.{last}".rstrip(".")] = layer
    for mlp in find_mlps(block):
        found[mlp.last] = block.get_submodule(mlp.last)
    if found:
        return found
    convolutions = [(name, part) for name, part in _beside_shortcuts(block).items() if isinstance(part, _ConvNd)]
    return dict(convolutions[-1:])


def find_last_norm(block: nn.Module) -> dict[str, nn.Module]:
    """Return the norm that ends the branch of a convolutional block, which is not in its shortcut.

    Example:
        >>> list(find_last_norm(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))))
        ['1']
    """
    layers = _beside_shortcuts(block)
    convolves = any(isinstance(layer, _ConvNd) for layer in layers.values())
    weighty = [(name, layer) for name, layer in layers.items() if has_parameters(layer, recurse=False)]
    if not convolves or not weighty:
        return {}
    name, last = weighty[-1]
    if not isinstance(last, _BatchNorm | nn.GroupNorm) or last.weight is None:
        return {}
    return {name: last}


def find_values(name: str, attention: nn.Module) -> Matrix | None:
    """Return the matrix of an attention that computes the values, also where it is a third of a larger one."""
    for place, module in attention.named_modules():
        own = f"{name}.{place}".rstrip(".")
        if isinstance(module, nn.MultiheadAttention):
            held: Any = module.in_proj_weight
            if held is None:
                return Matrix(f"{own}.v_proj_weight", module.get_parameter("v_proj_weight"))
            return Matrix(f"{own}.in_proj_weight", held[-(len(held) // 3) :])
        if not is_linear(module):
            continue
        weight: Any = module.get_parameter("weight")
        last = place.rpartition(".")[2].lower()
        if last in ("v", "v_proj", "value", "v_lin", "to_v"):
            return Matrix(f"{own}.weight", weight)
        inputs, outputs = sizes_of(module)
        if outputs == 3 * inputs:  # queries, keys and values, in this order
            part = weight[:, -inputs:] if is_a(module, CONV1D) else weight[-inputs:]
            return Matrix(f"{own}.weight", part)
    return None


def _beside_shortcuts(block: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in block.named_modules() if name and not _SHORTCUT.search(name)}
