"""Find the MLPs in a block: layers that widen the hidden states, and the one that narrows them again."""

import re
from dataclasses import dataclass

from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.select import CONV1D, as_list, find_skipped, is_a, is_linear

ATTENTION = re.compile("attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Mlp:
    """The linear layers of an MLP.

    Args:
        first: names of the layers that read the hidden states: one, or a gate and another one.
        last: name of the layer that returns to the width of the hidden states.
        width: features of the hidden states.
    """

    first: tuple[str, ...]
    last: str
    width: int


def sizes_of(layer: object) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer, or of GPT-2's transposed one.

    Example:
        >>> sizes_of(nn.Linear(4, 16))
        (4, 16)
    """
    if is_a(layer, CONV1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features


def find_mlps(block: nn.Module) -> list[Mlp]:
    """Return the MLPs of a block, in its order of layers; layers of attention are not looked at.

    Example:
        >>> block = nn.TransformerEncoderLayer(4, 2, dim_feedforward=16)
        >>> find_mlps(block)
        [Mlp(first=('linear1',), last='linear2', width=4)]
    """
    found: list[Mlp] = []
    waiting: dict[str, tuple[int, int]] = {}  # layers that widen, since the last MLP
    for name, layer in block.named_modules():
        if not name or ATTENTION.search(name) or not is_linear(layer):
            continue
        inputs, outputs = sizes_of(layer)
        first = tuple(one for one, sizes in waiting.items() if sizes == (outputs, inputs))
        if inputs > outputs and len(first) in (1, 2):
            found.append(Mlp(first, name, outputs))
            waiting.clear()
        elif outputs > inputs:
            waiting[name] = (inputs, outputs)
    return found


def choose_blocks(model: nn.Module, blocks: Blocks | None, skip: Blocks = ()) -> dict[str, nn.Module]:
    """Find the blocks of ``model`` and leave out those that ``skip`` matches.

    Raises:
        ValueError: there are no blocks; ``skip`` matches nothing, or all of them.
    """
    found = find_blocks(model, blocks)
    if not as_list(skip):
        return found
    skipped = find_skipped(model, skip)
    chosen = {name: block for name, block in found.items() if name not in skipped}
    if not chosen:
        why = f"it matches all {len(found)} blocks"
        raise ValueError(explain(f"skip={skip!r}", why, "Name fewer of them"))
    return chosen
