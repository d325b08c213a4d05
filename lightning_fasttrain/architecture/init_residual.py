"""Initialize residual branches by the depth of the model."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lightning_fasttrain.architecture.residual_blocks import ATTENTION, choose_blocks, find_mlps, sizes_of
from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.core.modules.select import CONV1D, has_parameters, is_a, is_inside, is_linear

Recipe = Literal["gpt2", "t_fixup", "zero", "zero_gamma"]


@check_arguments
@torch.no_grad()
def init_residual_(
    model: nn.Module,
    recipe: Recipe,
    *,
    std: PositiveFloat = 0.02,
    blocks: Blocks | None = None,
    skip: Blocks = (),
) -> dict[str, float]:
    """Initialize the residual branches of a model's blocks by its depth, in place.

    Residual projections are the layers that write into the residual stream: in each block the last layer of each
    attention and MLP, or the last convolution. With n of them in the model:

    - ``"gpt2"``: they are drawn from N(0, std² / n). So the variance of the stream does not grow with depth; a model of
      L blocks has n = 2L, as in GPT-2.
    - ``"zero"``: their weights and biases are zero, so each block starts as the identity.
    - ``"zero_gamma"``: the weight of the norm that ends each branch of a ResNet is zero, with the same effect.
    - ``"t_fixup"``: all matrices of attention and MLPs are drawn by Xavier's rule, and those of values, outputs and
      MLPs are multiplied by 0.67 · N^(-1/4), where N is the number of blocks; in blocks with cross-attention by
      (9N)^(-1/4). In a model that has such blocks, embeddings of width d are drawn from N(0, 1/d) and multiplied by
      that, too. The paper removes LayerNorm, and learning rate warm-up with it.

    Call it on a new model, before ``state_dict`` is loaded and the optimizer is created.

    Args:
        model: any module with weights.
        recipe: one of the above.
        std: standard deviation of GPT-2's other weights; of no use to the other recipes.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        skip: blocks to leave as they are.

    Returns:
        Qualified name of each changed parameter → the standard deviation that it was drawn with (``"gpt2"``), its
        factor (``"t_fixup"``), or 0.

    Raises:
        ValueError: no blocks were found, or a block has no such layer; the message names its layers.

    Example:
        >>> from lightning_fasttrain.bench import GPT, GPTConfig
        >>> net = GPT(GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8))
        >>> init_residual_(net, "gpt2")
        {'blocks.0.attention.out.weight': 0.01, 'blocks.0.down.weight': 0.01, 'blocks.1.attention.out.weight': 0.01, \
'blocks.1.down.weight': 0.01}

    Source:
        GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3, as Hugging
        Face's ``GPT2PreTrainedModel`` implements it; T-Fixup: Huang et al. 2020, "Improving Transformer Optimization
        Through Better Initialization", section 3.2; zero: Zhang et al. 2019, https://arxiv.org/abs/1901.09321; zero
        gamma: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1, and torchvision's
        ``zero_init_residual``.
    """
    found = choose_blocks(model, blocks, skip)
    if recipe == "t_fixup":
        return _init_t_fixup_(model, found)
    find = {"zero_gamma": find_last_norm}.get(recipe, find_projections)
    layers: dict[str, nn.Module] = {}
    for name, block in found.items():
        inside = find(block)
        _refuse_none(name, block, inside, recipe)
        for place, layer in inside.items():
            layers[f"{name}.{place}".strip(".")] = layer
    changed: dict[str, float] = {}
    for name, layer in layers.items():
        changed |= _init_(name, layer, recipe, std / math.sqrt(len(layers)))
    return changed


def _init_(name: str, layer: nn.Module, recipe: Recipe, std: float) -> dict[str, float]:
    weight = layer.get_parameter("weight")
    if recipe == "gpt2":
        nn.init.normal_(weight, std=std)
        return {f"{name}.weight": std}
    nn.init.zeros_(weight)
    bias = layer._parameters.get("bias")
    if recipe == "zero_gamma" or bias is None:
        return {f"{name}.weight": 0.0}
    nn.init.zeros_(bias)
    return {f"{name}.weight": 0.0, f"{name}.bias": 0.0}


def _init_t_fixup_(model: nn.Module, found: dict[str, nn.Module]) -> dict[str, float]:
    decoders = [name for name, block in found.items() if has_cross_attention(block)]
    changed: dict[str, float] = {}
    for name, block in found.items():
        _refuse_none(name, block, find_attentions(block), "t_fixup")
        _refuse_none(name, block, find_mlps(block), "t_fixup")
        others = len(found) - len(decoders)
        factor = (9 * len(decoders)) ** -0.25 if name in decoders else 0.67 * others**-0.25
        changed |= _init_transformer_block_(name, block, factor)
    if decoders:
        factor = (9 * len(decoders)) ** -0.25
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and not is_inside(name, found):  # not relative positions
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
                module.weight.mul_(factor)
                changed[f"{name}.weight"] = factor
    return changed


def _init_transformer_block_(name: str, block: nn.Module, factor: float) -> dict[str, float]:
    scaled: dict[str, Any] = {}
    for place, attention in find_attentions(block).items():
        values = find_values(place, attention)
        if values is None:
            _refuse_none(name, attention, (), "t_fixup")
        for part in attention.modules():
            if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
                _draw_thirds_(part.in_proj_weight)
        for layer in list_linear(attention).values():
            _draw_(layer)
        assert values is not None
        scaled[values.name] = values.weight
        last, layer = list(list_linear(attention).items())[-1]
        scaled[f"{place}.{last}.weight"] = layer.get_parameter("weight")
    for mlp in find_mlps(block):
        for place in (*mlp.first, mlp.last):
            layer = block.get_submodule(place)
            _draw_(layer)
            scaled[f"{place}.weight"] = layer.get_parameter("weight")
    factors: dict[str, float] = {}
    for place, weight in scaled.items():
        weight.mul_(factor)
        factors[f"{name}.{place}".strip(".")] = factor
    return factors


def _draw_(layer: nn.Module) -> None:
    """Draw a matrix by Xavier's rule; of queries, keys and values in one, each third by itself."""
    weight = layer.get_parameter("weight")
    rows, columns = weight.shape
    if rows == 3 * columns:
        _draw_thirds_(weight)
    elif columns == 3 * rows:  # GPT-2's transposed layers
        _draw_thirds_(weight.T)
    else:
        nn.init.xavier_uniform_(weight)


def _draw_thirds_(weight: torch.Tensor) -> None:
    for third in weight.chunk(3):
        nn.init.xavier_uniform_(third)


def _refuse_none(name: str, block: nn.Module, inside: object, recipe: Recipe) -> None:
    if inside:
        return
    wanted = {
        "zero_gamma": "no BatchNorm or GroupNorm ends its branch of convolutions",
        "t_fixup": "no attention with a layer of values and no MLP were both found in it",
    }
    layers = [f"'{place}' ({type(layer).__name__})" for place, layer in block.named_modules() if layer._parameters]
    why = wanted.get(recipe, "neither attention nor an MLP nor a convolution was found in it")
    why += f"; its layers are {list_some(layers, most=8) or 'none'}"
    way_out = "Leave it out with skip=, or name the blocks with blocks="
    raise ValueError(explain(f"init_residual_(recipe='{recipe}') in block '{name}'", why, way_out))


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
