"""Count the parameters of a model by part."""

import re

from torch import nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.parameters import count_elements
from lightning_fasttrain.core.modules.select import is_inside

_FEW = 0.002  # of all parameters: such parts are one row


@check_arguments
def count_parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each part: children of the repeated blocks, added up over blocks, and others.

    Tied parameters count once, in the part that comes first. Parts with less than 0.2% of all parameters are one row,
    "others".

    Args:
        model: any module; nothing but its shapes is used.

    Returns:
        Name of a part, with ``*`` for the index of a block → number of parameters, in the order of the model.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(16, 2, 64)
        >>> net = nn.Sequential(nn.Embedding(100, 16), *[block() for _ in range(3)])
        >>> parts = count_parameters_by_part(net)
        >>> parts["0"], parts["*.self_attn"], sum(parts.values())
        (1600, 3264, 11440)

    Source:
        Ours.
    """
    try:
        blocks = list(find_blocks(model))
    except ValueError:
        blocks = []
    found: dict[str, int] = {}
    # Without duplicates, so that tied parameters count once.
    for name, parameter in model.named_parameters():
        part = _part_of(name, blocks)
        found[part] = found.get(part, 0) + count_elements(parameter)
    total = sum(found.values())
    small = [part for part, count in found.items() if count < _FEW * total]
    if len(small) > 1:
        found["others"] = sum(found.pop(part) for part in small)
    return found


def _part_of(name: str, blocks: list[str]) -> str:
    owner, _, _ = name.rpartition(".")
    for block in blocks:
        if is_inside(name, [block]):
            child = name.removeprefix(f"{block}.").split(".")[0]
            return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", f"{block}.{child}")
    return owner or name
