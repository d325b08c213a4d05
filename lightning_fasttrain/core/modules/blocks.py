"""Find the repeated blocks of any model, and whether their calls pass a cache of keys and values."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.select import (
    Blocks,
    as_list,
    class_name,
    has_parameters,
    is_wanted,
    join_counts,
    keep_outermost,
    list_kinds,
    modules_of,
)
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_RANKS = "_ranks_of_tokens"
_A_KIND = 0.05  # of the parameters in blocks; what has fewer, such as two heads, is no kind of block of its own
_WORTH_A_WORD = 0.01  # of the model's parameters, where it is not in a block


@check_arguments
def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> dict[str, nn.Module]:
    """Find the repeated blocks of a model: layers of encoder and decoder, residual blocks, levels of a U-Net.

    A block is a layer that is made of at least two layers with weights, and that stands among others of its class: in
    a list, or as attributes of one module. All classes of which that is so count, with every block of each, also
    the only layer of a list, which a model may call several times (ALBERT). Classes with less than 5% of the parameters
    in blocks do not. What holds such lists itself, as the stages of a ResNet or the two stacks of T5, is no block; they
    are looked for inside of it. In a model without, such as an MLP, the longest run of one class counts, whatever
    that is; where no two neighbours are of one class, as in a ``Sequential`` of linear layers and activations, others
    may lie between. A ``ModuleList`` inside another one is no block if there are others, since no model calls it: its
    members count as members of the list that holds it. Parts of several layers, with at least 1% of the parameters,
    that are in no block are named in one line.

    Args:
        model: any module; a ``LightningModule`` or a wrapper that holds the real model is fine.
        blocks: what to take instead: a class, a class name, or a pattern of qualified names in which ``*`` stands
            for one name and ``**`` for any number (``"model.layers.*"``); or several of these.

    Returns:
        Qualified name → block, in the model's own order. No block lies inside another.

    Raises:
        ValueError: nothing repeats, or nothing matches; the message lists the candidates with their counts.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Embedding(8, 4), *[nn.TransformerEncoderLayer(4, 1) for _ in range(3)])
        >>> list(find_blocks(net))
        ['1', '2', '3']
        >>> list(find_blocks(net, "*.self_attn"))
        ['1.self_attn', '2.self_attn', '3.self_attn']
        >>> list(find_blocks(nn.Transformer(4, 2, 1, 2, batch_first=True)))
        ['encoder.layers.0', 'decoder.layers.0', 'decoder.layers.1']
    """
    if blocks is None:
        found, what = _find_repeated(model), "no repeated blocks"
    else:
        found, what = _match_blocks(model, blocks), f"blocks={blocks!r} matches nothing"
    if not found:
        raise ValueError(
            f"{what} in {type(model).__name__}: candidates are {list_kinds(model)}. "
            "Name the blocks yourself, with blocks= a class, a class name or a pattern such as 'model.layers.*'."
        )
    return found


def _find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    search = _Search(model)
    layered, longest = search.layered_blocks(), search.longest_run()
    # A few small layered things, such as two heads, are not the body of a model that is made of single layers; but
    # embeddings are no body either, though they outweigh the only layer of a small BERT.
    is_body = not layered or not all(map(_is_table, longest.values()))
    found = layered
    if is_body and _share(model, longest) > 2 * _share(model, layered):
        found = longest
    if found:
        search.tell_what_is_left_out(found)
    return found


class _Search:
    """Search for the repeated blocks of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.weighty: dict[nn.Module, int] = {}  # how many layers with weights are inside
        self._count_weights(model)

    def _count_weights(self, module: nn.Module) -> int:
        if module not in self.weighty:
            self.weighty[module] = sum(map(self._count_weights, module.children())) + _has_weight(module)
            # An adapter's wrapper is one layer, however many matrices it adds to it.
            if "base_layer" in module._modules:
                self.weighty[module] = 1
        return self.weighty[module]

    def _named(self, modules: set[nn.Module]) -> dict[str, nn.Module]:
        """Some modules by name, in the model's order; those that lie in another of them are left out."""
        return keep_outermost({name: module for module, name in self.names.items() if module in modules})

    def layered_blocks(self) -> dict[str, nn.Module]:
        """Every block that is made of layers, of all the classes that matter."""
        members: set[nn.Module] = set()
        for parent in self.names:
            for run in self._runs_of(parent):
                # One member that holds blocks is enough: a stage with a single layer is a stage like its siblings.
                if not any(self._holds_blocks(member, parent) for member in run):
                    members.update(run)
        kinds = self._kinds_that_matter(self._named(members))
        every: set[nn.Module] = set()
        for module in self.names:
            if type(module) in kinds and self._is_layered(module):
                every.add(module)
            # Layers of another class in the same list are blocks as well, even if there is only one of them. Of a
            # ModuleList only: a Sequential may hold the model's stem and head beside its blocks.
            if type(module) is nn.ModuleList and not kinds.isdisjoint(map(type, module)):
                every.update(filter(self._is_layered, module))
        return self._named(every)  # of a class that counts there may be one inside a block

    def _is_layered(self, module: nn.Module) -> bool:
        # `type`: a user's subclass of Sequential may well be a block.
        return self.weighty[module] > 1 and type(module) not in _CONTAINERS and _is_callable(module)

    def _runs_of(self, parent: nn.Module) -> list[list[nn.Module]]:
        """Children of one class, at least two; or the only one of a list."""
        runs: dict[type[nn.Module], list[nn.Module]] = {}
        for child in _members(parent):
            if self._is_layered(child):
                runs.setdefault(type(child), []).append(child)
        # A set, since a list may hold one layer several times, to call it several times.
        alone = isinstance(parent, nn.ModuleList) and len(set(parent)) == 1
        return [run for run in runs.values() if alone or len(run) > 1]

    def _holds_blocks(self, module: nn.Module, parent: nn.Module) -> bool:
        """Whether blocks are to be looked for inside of this member of a run."""
        if isinstance(parent, _CONTAINERS):
            return self._is_stack(module)
        return any(map(self._runs_of, modules_of(module, _CONTAINERS))) or self._is_stack(module)

    def _is_stack(self, module: nn.Module) -> bool:
        """Whether all that has several layers in it is lists of blocks: a stage, an encoder, a whole model.

        A block with experts is none, as its attention stands beside them.
        """
        runs = self._runs_of(module)
        # More than two, as many blocks have two parts of one class: attention to themselves and to the encoder.
        if runs and (isinstance(module, _CONTAINERS) or max(map(len, runs)) > 2):
            return True
        parts = [child for child in module.children() if self.weighty[child] > 1]
        return bool(parts) and all(map(self._is_stack, parts))

    def _kinds_that_matter(self, found: dict[str, nn.Module]) -> set[type[nn.Module]]:
        sizes: Counter[type[nn.Module]] = Counter()
        for block in found.values():
            sizes[type(block)] += _size(block)
        return {kind for kind, size in sizes.items() if size >= _A_KIND * sizes.total()}

    def longest_run(self) -> dict[str, nn.Module]:
        """The longest run of one class of siblings, and every other run of that class."""
        runs: list[list[tuple[str, nn.Module]]] = []
        for lists in (False, True):
            for neighbours in (True, False):
                runs = runs or list(_runs(self.model, neighbours, lists))
        if not runs:
            return {}
        longest = max(runs, key=lambda run: (_rank(run[0][1]), len(run)))  # the first, outermost, of equals
        kind = type(longest[0][1])
        same_kind: dict[str, nn.Module] = {}
        for run in runs:
            if type(run[0][1]) is kind:
                same_kind.update(run)
        # A run may lie inside a member of another run of its class.
        return keep_outermost(same_kind)

    def tell_what_is_left_out(self, found: dict[str, nn.Module]) -> None:
        taken = set(found.values())
        # The blocks themselves, and everything that holds one.
        around = {above for above in self.names if taken.intersection(above.modules())}
        left: set[nn.Module] = set()
        for module in around - taken:
            left.update(child for child in module.children() if self.weighty[child] > 1)
        left -= around
        # A head may be tied to one of these tables.
        tables: set[nn.Parameter] = set()
        for module in filter(_is_table, self.names):
            tables.update(module.parameters())
        total, listed = max(_size(self.model), 1), []
        for module, name in self.names.items():
            if module in left:
                share = _size(module, tables) / total
                if share >= _WORTH_A_WORD:
                    listed.append(f"'{name}' ({share:.0%} of the parameters)")
        if listed:
            blocks = join_counts(Counter(map(class_name, found.values())).items())
            outside = ", ".join(listed)
            note_once(f"find_blocks: {class_name(self.model)} has blocks {blocks}; outside of them are {outside}")


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    if is_lazy(parameter):
        return (1, 1)  # it has no shape yet, and has to count as a matrix
    # DeepSpeed leaves a part of the parameter here, and keeps the shape of the whole.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _has_weight(module: nn.Module) -> bool:
    """Whether it is a layer with a matrix or kernel; tables of vectors (embeddings) and bare tensors do not count."""
    if _is_table(module):
        return False
    # In the name, not the name: nn.MultiheadAttention has in_proj_weight, and recurrent layers have weight_ih_l0.
    return any(len(_shape(p)) > 1 and "weight" in name for name, p in module.named_parameters(recurse=False))


def _is_callable(module: nn.Module) -> bool:
    """Whether a model can call it; lists have no forward."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not is_list or type(module).forward is not nn.Module.forward


def _members(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the children; in a list, the members of lists in it stand for them."""
    for child in parent.children():
        if _is_callable(child) or _is_callable(parent):
            yield child
        else:
            yield from _members(child)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _size(module: nn.Module, without: Collection[nn.Parameter] = ()) -> int:
    return sum(math.prod(_shape(parameter)) for parameter in module.parameters() if parameter not in without)


def _share(model: nn.Module, found: dict[str, nn.Module]) -> float:
    return sum(map(_size, found.values())) / max(_size(model), 1)


def _runs(model: nn.Module, neighbours: bool, lists: bool) -> Iterator[list[tuple[str, nn.Module]]]:
    """Every run of at least two same-class children with parameters.

    Args:
        model: any module.
        neighbours: with nothing in between.
        lists: also of lists, which no model calls; they still tell which parameters belong together.
    """
    for prefix, parent in model.named_modules():
        children = []
        for name, child in parent.named_children():
            if lists or _is_callable(child):
                children.append((f"{prefix}.{name}".removeprefix("."), child))
        if not neighbours:
            # A stable sort, so that the members of a class keep their order.
            children.sort(key=lambda item: id(type(item[1])))
        for _, run in groupby(children, key=lambda item: type(item[1])):
            members = list(run)
            if len(members) > 1 and has_parameters(members[0][1]):
                yield members


# For the longest run: made of parts, before containers, before single layers, however many of these there are.
def _rank(module: nn.Module) -> int:
    if next(module.children(), None) is None:
        return 0
    if type(module) in _CONTAINERS:
        return 1
    return 2


def _match_blocks(model: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    wanted = as_list(blocks)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(is_wanted(name, module, one) for one in wanted):
            found[name] = module
    return keep_outermost(found)


def divide_lengths_by_(block: nn.Module, ranks: int) -> None:
    """Let :func:`length_divisor` know that so many ranks have equal shares of the tokens of a block's input."""
    setattr(block, _RANKS, ranks)


def length_divisor(models: Iterable[nn.Module]) -> int:
    """Return the number of which the models need multiples as lengths of sequences; 1 for any length."""
    return math.lcm(*(getattr(module, _RANKS, 1) for model in models for module in model.modules()))


def disable_cache_(model: nn.Module) -> dict[str, Undo]:
    """Set ``use_cache=False`` in the configurations of the models inside ``model``.

    Returns:
        Qualified name of each setting that was changed → how to restore it.
    """
    undos: dict[str, Undo] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            # Modules share configs: the next one with this config finds False, so it is restored only once.
            undos[f"{name}.config.use_cache"] = patch(config, "use_cache", False)
    return undos
