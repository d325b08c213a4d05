"""The layers of a model as they were before adapters came, and which of them make its predictions."""

from collections.abc import Collection, Iterable
from typing import Any, cast

from torch import nn

from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks, is_wanted, list_kinds
from lightning_fasttrain.core.modules.wrapped_forward import told_heads


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
    order = list(layers)
    blocks = _blocks_of(model)
    outside = [name for name in linear if not is_inside(name, blocks)]
    # 0 without blocks: all layers come after it then, and the line below leaves the last one.
    last = max((i for i, name in enumerate(order) if is_inside(name, blocks)), default=0)
    after = [name for name in linear if order.index(name) > last]
    # So many layers that come after the blocks are no head but another half of the model, whose last layer is one.
    after = after if 4 * len(after) <= len(linear) else after[-1:]
    heads = {
        *_find_told(model, linear, layers),
        *_tied_names(model, linear, layers),
        *_of_vocabulary(model, outside, layers),
        *after,
    }
    # The only layer that could be adapted or quantised is not left out: nothing would be done.
    return [] if len(linear) == 1 and not blocks else sorted(heads, key=order.index)


def outside_blocks(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Keep the names outside of the model's repeated blocks; all of them where it has no blocks of layers."""
    blocks = _blocks_of(model)
    return [name for name in names if not is_inside(name, blocks)]


def heads_beside(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Names of the heads that are neither one of ``blocks`` nor in one."""
    return [head for head in find_heads(model) if not is_inside(head, blocks) and head not in blocks]


def warn_of_blocks_beyond(model: nn.Module, blocks: Collection[str], named: Collection[str], what: str) -> None:
    """Say so where blocks of another kind come after the last of ``blocks``, and would count as head."""
    names = [name for name, _ in model.named_modules()]
    last = max((i for i, name in enumerate(names) if name in blocks), default=0)
    taken = {*blocks, *named}
    beyond: list[str] = []
    for name in _blocks_of(model):
        holds_taken = any(one.startswith(f"{name}.") for one in blocks)
        if names.index(name) > last and not (name in taken or is_inside(name, taken) or holds_taken):
            beyond.append(name)
    if beyond:
        why = f"{list_some(beyond)} come after the blocks that are named, and would count as head"
        warn(explain(what, why, "Name these blocks too, or leave blocks= out"))


def is_inside(name: str, blocks: Collection[str]) -> bool:
    """Whether ``name`` is that of a part of one of ``blocks``."""
    return any(name.startswith(f"{block}.") for block in blocks)


def find_skipped(model: nn.Module, skip: Blocks) -> set[str]:
    """Names of the modules that a user wants left as they are, and of all that lies inside of them."""
    modules = dict(model.named_modules())
    outer: list[str] = []
    for wanted in [skip] if isinstance(skip, str | type) else list(skip):
        if not isinstance(wanted, str) and not (isinstance(wanted, type) and issubclass(wanted, nn.Module)):
            why = "expected a module class or a name pattern"
            raise TypeError(explain(f"skip={wanted!r}", why, "Use skip=['**.router']"))
        found = [name for name, module in modules.items() if is_wanted(name, module, wanted)]
        if not found:
            why = f"candidates are {list_kinds(model)}"
            way_out = "Give a class, a class name or a pattern such as '**.router'"
            raise ValueError(explain(f"skip={wanted!r} matches nothing in {type(model).__name__}", why, way_out))
        outer += found
    return {name for name in modules if name in outer or is_inside(name, outer) or "" in outer}


def _blocks_of(model: nn.Module) -> list[str]:
    try:
        blocks = find_blocks(model)
    except ValueError:
        return []
    return [name for name, block in blocks.items() if not is_linear(block)]


def _find_told(model: nn.Module, linear: list[str], layers: dict[str, nn.Module]) -> list[str]:
    told = [base_of(head) for head in told_heads(model)]
    return [name for name in linear if layers[name] in told]


def _tied_names(model: nn.Module, linear: list[str], layers: dict[str, nn.Module]) -> list[str]:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [name for name in linear if id(layers[name].weight) in tables]


def _of_vocabulary(model: nn.Module, outside: list[str], layers: dict[str, nn.Module]) -> list[str]:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = max(tables, key=lambda table: table.num_embeddings, default=None)
    if vocabulary is None or vocabulary.num_embeddings <= vocabulary.embedding_dim:  # a table of positions, say
        return []
    return [name for name in outside if getattr(layers[name], "out_features", 0) == vocabulary.num_embeddings]


def base_of(module: nn.Module) -> nn.Module:
    """The layer under an adapter, or the module itself."""
    return cast(Any, module).get_base_layer() if _is_adapted(module) else module


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name → module, without what an adapter brought; an adapted layer is represented by its base."""
    found: dict[str, nn.Module] = {}
    inside = "\0"  # no name begins with it
    for name, module in model.named_modules():
        if not name or name.startswith(inside) or stands_for(module):
            continue
        if _is_adapted(module) or is_a(module, "BasePromptEncoder"):
            inside = f"{name}."
        if not is_a(module, "BasePromptEncoder"):
            found[name] = base_of(module)
    return found


def _is_adapted(module: nn.Module) -> bool:
    return is_a(module, "BaseTunerLayer")


def is_a(module: nn.Module, ancestor: str) -> bool:
    """Asked by name, so that PEFT is not imported for models that never met it."""
    return any(base.__name__ == ancestor for base in type(module).__mro__)


def is_linear(layer: nn.Module) -> bool:
    """``nn.Linear``, its quantised descendants, and GPT-2's transposed one; not those inside ``nn.MultiheadAttention``,
    which computes with their weights and never calls them."""
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear) or stands_for(layer):
        return False
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def stands_for(layer: nn.Module) -> tuple[int, ...] | None:
    """The shape of the tensor that a quantised layer holds for another module, which alone uses it; else None."""
    return vars(layer).get("stands_for")  # not getattr, which an adapter's wrapper passes on to what it holds
