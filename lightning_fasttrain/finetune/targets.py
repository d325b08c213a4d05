"""Which layers of a model get an adapter, from what a user says: names, patterns, classes or "all-linear"."""

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Any, cast

from torch import nn

from lightning_fasttrain._blocks import find_blocks
from lightning_fasttrain._checks import require
from lightning_fasttrain._messages import explain
from lightning_fasttrain._surgery import told_heads

Target = str | re.Pattern[str] | type[nn.Module]
Targets = Target | Iterable[Target]
ALL_LINEAR = "all-linear"


def find_targets(model: nn.Module, targets: Targets = ALL_LINEAR) -> dict[str, nn.Module]:
    """Find the layers that ``targets`` means.

    Args:
        model: any module; layers that carry an adapter already count as what they were.
        targets: ``"all-linear"``, every linear layer but the heads (:func:`find_heads`); or one or several of: a
            qualified name or the end of one (``"attn.q_proj"``), a pattern in which ``*`` stands for one name and
            ``**`` for any number, a compiled regular expression for the whole name, a class, a class name.

    Returns:
        Qualified name → layer, in the model's own order.

    Raises:
        ValueError: one of ``targets`` matches nothing (the message lists near names and what would match), or a layer
            shares its weight with another, which would then no longer be the same.
        TypeError: one of ``targets`` is none of the above.

    Example:
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(4, 1) for _ in range(2)], nn.Linear(4, 9))
        >>> list(find_targets(net))
        ['0.linear1', '0.linear2', '1.linear1', '1.linear2']
        >>> list(find_targets(net, ["1.linear2", nn.LayerNorm, re.compile(r"\\d")]))
        ['0', '0.norm1', '0.norm2', '1', '1.linear2', '1.norm1', '1.norm2', '2']
    """
    layers = _layers(model)
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        heads = find_heads(model)
        found = {name: layer for name, layer in layers.items() if name not in heads and _is_linear(layer)}
        if not found:
            raise ValueError(
                explain(
                    f"targets='{ALL_LINEAR}'",
                    f"{type(model).__name__} has no linear layer besides heads ({', '.join(heads) or 'none'})",
                    f"Name the layers. Candidates: {_kinds(layers)}",
                )
            )
        return found
    wanted = [targets] if isinstance(targets, str | type | re.Pattern) else list(targets)
    if not wanted:
        raise ValueError(explain("targets=[]", "an adapter sits on at least one layer", f"Use '{ALL_LINEAR}'"))
    names: set[str] = set()
    for target in wanted:
        matched = {name for name, layer in layers.items() if _means(target, name, layer)}
        if not matched:
            raise ValueError(_nothing_matched(target, model, layers))
        names |= matched
    return {name: layer for name, layer in layers.items() if name in names}


def find_heads(model: nn.Module) -> list[str]:
    """Names of the layers that turn features into predictions, which "all-linear" and quantisation leave out.

    These are what Hugging Face's models return from ``get_output_embeddings()``, linear layers that share their weight
    with an embedding, and linear layers that come after the last of the model's repeated blocks. In a model without
    such blocks it is the last linear layer, unless that is the only one.

    Example:
        >>> find_heads(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        ['2']
    """
    layers = _layers(model)
    linear = [name for name, layer in layers.items() if _is_linear(layer)]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {name for name in linear if id(layers[name].weight) in embeddings}
    told = [base_of(head) for head in told_heads(model)]
    heads |= {name for name in linear if any(layers[name] is head for head in told)}
    order = list(layers)
    try:
        blocks = find_blocks(model)
    except ValueError:
        blocks = {}
    blocks = {name: block for name, block in blocks.items() if not _is_linear(block)}
    inside = max(
        (i for i, name in enumerate(order) if any(name.startswith(f"{block}.") for block in blocks)), default=0
    )
    after = [name for name in linear if order.index(name) > inside]
    # So many layers that come after the blocks are no head but another half of the model, whose last layer is one.
    heads |= set(after if 4 * len(after) <= len(linear) else after[-1:])
    return [] if len(linear) == 1 and not blocks else sorted(heads, key=order.index)


def base_of(module: nn.Module) -> nn.Module:
    """The layer under an adapter, or the module itself."""
    return cast(Any, module).get_base_layer() if _is_adapted(module) else module


def refuse_tied(model: nn.Module, names: Collection[str]) -> None:
    """Refuse layers whose weight is also that of another layer: an adapter on one of them would part the two.

    Raises:
        ValueError: names the layers.
    """
    holders: dict[int, list[str]] = {}
    for name, layer in _layers(model).items():
        weight = layer._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    for tied in holders.values():
        mine = [name for name in tied if name in names]
        if mine and len(tied) > 1:
            other = next((name for name in tied if name not in mine), tied[-1])
            raise ValueError(
                explain(
                    f"target '{mine[0]}'",
                    f"its weight is also that of '{other}', and an adapter would make the two differ",
                    "Leave it out of the targets, or untie the two first",
                )
            )


def shortest_names(names: Collection[str], model: nn.Module) -> list[str] | str:
    """The shortest list of endings of names, as adapter files hold it, that means just these layers of ``model``.

    PEFT takes a layer if its name is, or ends with a dot and, one of the list. Where no list of endings means exactly
    these layers, it is a regular expression.
    """
    everything = [name for name, _ in model.named_modules() if name]
    for parts in range(1, 1 + max(name.count(".") + 1 for name in names)):
        candidate = {".".join(name.split(".")[-parts:]) for name in names}
        ends = tuple(f".{end}" for end in candidate)
        if {name for name in everything if name in candidate or name.endswith(ends)} == set(names):
            return sorted(candidate)
    return "|".join(re.escape(name) for name in names)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name → module, without what an adapter brought; an adapted layer is represented by its base."""
    found: dict[str, nn.Module] = {}
    inside = "\0"
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
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


def _is_linear(layer: nn.Module) -> bool:
    """``nn.Linear``, its quantised descendants, and GPT-2's transposed one; not those inside ``nn.MultiheadAttention``,
    which computes with their weights and never calls them."""
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _means(target: Any, name: str, layer: nn.Module) -> bool:
    if isinstance(target, type):
        return isinstance(layer, target)
    if isinstance(target, re.Pattern):
        return target.fullmatch(name) is not None
    if not isinstance(target, str):
        raise TypeError(
            explain(f"targets={target!r}", "a target is a name, a pattern or a class of layers", "Use 'q_proj', say")
        )
    if "*" in target:
        pattern = re.escape(target).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
        return re.fullmatch(pattern, name) is not None
    return name == target or name.endswith(f".{target}") or type(layer).__name__ == target


def _nothing_matched(target: Any, model: nn.Module, layers: dict[str, nn.Module]) -> str:
    ends = sorted({name.rpartition(".")[2] for name in layers})
    near = difflib.get_close_matches(str(target), [*ends, *layers], n=3, cutoff=0.5)
    return explain(
        f"targets={target!r}",
        f"no layer of {type(model).__name__} has that name" + (f"; near is {', '.join(near)}" if near else ""),
        f"Candidates: {_kinds(layers)}; or use '{ALL_LINEAR}'",
    )


def _kinds(layers: dict[str, nn.Module]) -> str:
    counts: dict[str, int] = {}
    for name, layer in layers.items():
        if any(True for _ in layer.parameters(recurse=False)):
            end = f"{name.rpartition('.')[2]} ({type(layer).__name__})"
            counts[end] = counts.get(end, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])[:12]
    return ", ".join(f"{kind} ×{count}" for kind, count in ranked) or "none"


def require_peft() -> Any:
    """PEFT, or the error that names the extra which brings it."""
    return require("peft", extra="finetune")
