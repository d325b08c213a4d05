"""The layers of a model that make its predictions."""

from collections.abc import Collection, Iterable

from torch import nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.select import (
    Sharing,
    base_of,
    is_inside,
    is_linear,
    is_part_of,
    layers_of,
    list_names_above,
    modules_of,
)
from lightning_fasttrain.core.modules.wrapped_forward import told_heads


@check_arguments
def find_heads(model: nn.Module) -> list[str]:
    """Names of the layers that turn features into predictions, which "all-linear" and quantisation leave out.

    These are what Hugging Face's models return from ``get_output_embeddings()``; linear layers that share their weight
    with an embedding; outside of the model's repeated blocks, those with one output for each row of its largest
    embedding, wherever they are listed; and those that come after the last block. In a model without such blocks it is
    the last linear layer, unless that is the only one.

    Example:
        >>> find_heads(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        ['2']
    """
    layers = layers_of(model)
    linear = [name for name, layer in layers.items() if is_linear(layer)]
    places = dict(zip(layers, range(len(layers)), strict=True))
    blocks = _blocks_of(model)
    outside = _outside(linear, blocks)
    # 0 without blocks: all layers come after it then, and the line below leaves the last one.
    last = max(map(places.__getitem__, set(layers).difference(_outside(layers, blocks))), default=0)
    after = [name for name in linear if places[name] > last]
    # So many layers that come after the blocks are no head but another half of the model, whose last layer is one.
    if 4 * len(after) > len(linear):
        after = after[-1:]
    heads = {
        *_find_told(model, linear, layers),
        *_tied_names(model, linear),
        *_of_vocabulary(model, outside, layers),
        *after,
    }
    # The only layer that could be adapted or quantised is not left out: nothing would be done.
    if len(linear) == 1 and not blocks:
        return []
    return sorted(heads, key=places.__getitem__)


def outside_blocks(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Keep the names outside of the model's repeated blocks; all of them where it has no blocks of layers."""
    return _outside(names, _blocks_of(model))


def _outside(names: Iterable[str], blocks: Collection[str]) -> list[str]:
    return [name for name in names if not is_inside(name, blocks)]


def heads_beside(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Names of the heads that are neither one of ``blocks`` nor in one."""
    return [head for head in _outside(find_heads(model), blocks) if head not in blocks]


def warn_of_blocks_beyond(model: nn.Module, blocks: Collection[str], named: Collection[str], what: str) -> None:
    """Say so where blocks of another kind come after the last of ``blocks``, and would count as head."""
    names = list(dict(model.named_modules()))
    last = max(map(names.index, set(names).intersection(blocks)), default=0)
    taken = {*blocks, *named}
    beyond: list[str] = []
    for name in _blocks_of(model):
        holds_taken = any(is_inside(one, [name]) for one in blocks)
        if names.index(name) > last and not (is_part_of(name, taken) or holds_taken):
            beyond.append(name)
    if beyond:
        why = f"{list_some(beyond)} come after the blocks that are named, and would count as head"
        warn(explain(what, why, "Name these blocks too, or leave blocks= out"))


def _blocks_of(model: nn.Module) -> list[str]:
    try:
        blocks = find_blocks(model)
    except ValueError:
        return []
    return [name for name, block in blocks.items() if not is_linear(block)]


def _find_told(model: nn.Module, linear: list[str], layers: dict[str, nn.Module]) -> list[str]:
    told = list(map(base_of, told_heads(model)))
    return [name for name in linear if layers[name] in told]


def _tied_names(model: nn.Module, linear: list[str]) -> list[str]:
    owners: set[str] = set()
    for key in Sharing(model).outside(list(modules_of(model, nn.Embedding))):
        owners.update(list_names_above(key))
    return [name for name in linear if name in owners]


def _of_vocabulary(model: nn.Module, outside: list[str], layers: dict[str, nn.Module]) -> list[str]:
    vocabulary = max(modules_of(model, nn.Embedding), key=lambda table: table.num_embeddings, default=None)
    if vocabulary is None or vocabulary.num_embeddings <= vocabulary.embedding_dim:  # a table of positions, say
        return []
    return [name for name in outside if getattr(layers[name], "out_features", 0) == vocabulary.num_embeddings]
