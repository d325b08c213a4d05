"""Select the blocks that a technique changes."""

from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.select import as_list, find_skipped


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
