"""Floor: find the repeated blocks of any model, and put something in the place of a module's ``forward``."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from torch import nn

Undo = Callable[[], None]
Blocks = str | type[nn.Module] | Iterable[str | type[nn.Module]]


def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> dict[str, nn.Module]:
    """Find the repeated blocks of a model: the layers of a transformer, the residual blocks of a ResNet.

    By default these are the longest run of same-class siblings, wherever it is, and every other run of that class
    (a ResNet repeats its block in several stages). Siblings that are made of other modules go before single
    layers such as the four projections of an attention, those of a class of their own before plain containers such
    as the stages of a ResNet, and parameterless modules do not count. Only where no two
    neighbours are of one class, as in a ``Sequential`` of linear layers and activations, may others lie between.

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
    """
    found = _matching(model, blocks) if blocks is not None else _repeated(model)
    if not found:
        what = "no repeated blocks" if blocks is None else f"blocks={blocks!r} matches nothing"
        raise ValueError(
            f"{what} in {type(model).__name__}: candidates are {_candidates(model)}. "
            "Name the blocks yourself, with blocks= a class, a class name or a pattern such as 'model.layers.*'."
        )
    return found


def told_heads(model: nn.Module) -> list[nn.Module]:
    """The layers that make logits, as Hugging Face's models inside ``model`` tell by ``get_output_embeddings()``.

    Classes are asked, because adapters' wrappers pass on every attribute of the model that they hold.
    """
    models: list[Any] = [module for module in model.modules() if hasattr(type(module), "get_output_embeddings")]
    return [head for head in (module.get_output_embeddings() for module in models) if head is not None]


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    runs = list(_runs(model, neighbours=True)) or list(_runs(model, neighbours=False))
    if not runs:
        return {}
    longest = max(runs, key=lambda run: (_rank(run[0][1]), len(run)))  # the first, outermost, of equals
    kind = type(longest[0][1])
    return _outermost({name: block for run in runs if type(run[0][1]) is kind for name, block in run})


def _runs(model: nn.Module, neighbours: bool) -> Iterator[list[tuple[str, nn.Module]]]:
    """Every run of at least two same-class children with parameters; ``neighbours``: with nothing in between."""
    for prefix, parent in model.named_modules():
        children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in parent.named_children()]
        if not neighbours:
            children.sort(key=lambda item: id(type(item[1])))  # stable: the members keep their order
        for _, run in groupby(children, key=lambda item: type(item[1])):
            members = list(run)
            if len(members) > 1 and any(True for _ in members[0][1].parameters()):
                yield members


def _rank(module: nn.Module) -> int:
    if not any(True for _ in module.children()):
        return 0
    return 1 if type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict) else 2


def _matching(model: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    wanted = [blocks] if isinstance(blocks, str | type) else list(blocks)
    return _outermost(
        {name: module for name, module in model.named_modules() if any(_matches(name, module, w) for w in wanted)}
    )


def _matches(name: str, module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    if type(module).__name__ == wanted:
        return True
    pattern = re.escape(wanted).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
    return re.fullmatch(pattern, name) is not None


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    kept: dict[str, nn.Module] = {}
    for name, module in modules.items():  # parents come before their children
        if not any(other == "" or name.startswith(f"{other}.") for other in kept):
            kept[name] = module
    return kept


def _candidates(model: nn.Module) -> str:
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if name and any(True for _ in module.parameters()):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])[:8]
    return ", ".join(f"{kind} ×{count}" for kind, count in ranked) or "none (no submodule has parameters)"


class WrappedForward:
    """Stands in the place of a module's ``forward``: in place, so that type, hooks and ``state_dict`` keys stay.

    Subclasses override ``__call__`` and reach what was there before through ``self.inner``. The object holds the
    module rather than a bound method, so that ``copy.deepcopy`` of the model gives a copy that calls itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous = module.__dict__.get("forward")  # another wrapper, or None for the class's own method

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def install(self) -> Undo:
        """Put this object in place; the returned function takes it out again, wherever in the stack it then is."""
        self.module.forward = self

        def undo() -> None:
            holder: Any = self.module.__dict__.get("forward")
            if holder is self:
                if self.previous is None:
                    del self.module.forward
                else:
                    self.module.forward = self.previous
                return
            while isinstance(holder, WrappedForward):  # something was put on top since: unlink from the middle
                if holder.previous is self:
                    holder.previous = self.previous
                    return
                holder = holder.previous

        return undo


def wrapper_on(module: nn.Module, kind: type[WrappedForward]) -> bool:
    """Whether a wrapper of this ``kind`` already stands on ``module``, at any depth."""
    holder = module.__dict__.get("forward")
    while isinstance(holder, WrappedForward):
        if isinstance(holder, kind):
            return True
        holder = holder.previous
    return False
