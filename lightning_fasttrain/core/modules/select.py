"""Select modules and parameters of a model by class, class name or pattern, with one error where nothing matches."""

import difflib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from torch import nn

from lightning_fasttrain.core.messages import explain

Named = str | type[nn.Module]
Blocks = Named | Iterable[Named]
M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=str | re.Pattern[str] | type[nn.Module])


def is_wanted(name: str, module: nn.Module, wanted: Named) -> bool:
    """Check whether a class, or a name or pattern, means this module."""
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    if type(module).__name__ == wanted:
        return True
    return matches_pattern(name, wanted)


def matches_pattern(name: str, pattern: str) -> bool:
    """Check whether a pattern, in which ``*`` is one name and ``**`` any number of them, means this qualified name.

    Example:
        >>> matches_pattern("blocks.0.weight", "blocks.*.weight"), matches_pattern("blocks.0.weight", "blocks.*")
        (True, False)
    """
    # The longer one first: after "*" is replaced, no "**" is left to be found.
    expression = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
    return re.fullmatch(expression, name) is not None


def as_list(wanted: S | Iterable[S]) -> list[S]:
    """Return one selector, or several of them, as a list."""
    if isinstance(wanted, str | type | re.Pattern):
        return [cast(Any, wanted)]
    return list(wanted)


def select(
    model: nn.Module,
    wanted: Iterable[S],
    places: Mapping[str, nn.Module],
    argument: str = "",
    means: Callable[[str, nn.Module, S], bool] = is_wanted,
    list_candidates: Callable[[nn.Module], str] | None = None,
) -> dict[str, nn.Module]:
    """Return the ``places`` that ``wanted`` means, in their order.

    Args:
        model: the model that they belong to.
        wanted: classes, and names or patterns.
        places: qualified name → module; for a parameter the module that has it.
        argument: name of the argument that gave ``wanted``.
        means: whether an entry of ``wanted`` means a name and its module.
        list_candidates: what the message lists for this model; by default its classes of modules.

    Raises:
        TypeError: an entry is neither a string nor a class of modules.
        ValueError: an entry means nothing; the message lists similar names and the candidates.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        >>> list(select(net, [nn.ReLU], dict(net.named_modules())))
        ['1']
    """
    found: set[str] = set()
    for one in wanted:
        _refuse_other_kinds(one, argument)
        matched = {name for name, module in places.items() if means(name, module, one)}
        if not matched:
            word = getattr(one, "__name__", one)
            what = f"{argument}={word!r}".removeprefix("=")
            kinds = set(map(class_name, model.modules()))
            ends = {name.rpartition(".")[2] for name in places}
            near = difflib.get_close_matches(str(word), [*filter(None, {*places, *ends}), *kinds], n=4, cutoff=0.5)
            why = f"candidates are {(list_candidates or list_kinds)(model)}"
            listed = ", ".join(near) or "none"
            way_out = f"Similar names: {listed}. Give a name, a pattern such as 'blocks.*', or a class"
            raise ValueError(explain(f"{what} matches nothing in {type(model).__name__}", why, way_out))
        found |= matched
    return {name: module for name, module in places.items() if name in found}


def _refuse_other_kinds(wanted: object, argument: str) -> None:
    is_class = isinstance(wanted, type) and issubclass(wanted, nn.Module)
    if not is_class and not isinstance(wanted, str | re.Pattern):
        what = f"{argument}={wanted!r}".removeprefix("=")
        raise TypeError(explain(what, "expected a name pattern or a class of modules", "Name the module by a string"))


def list_kinds(model: nn.Module) -> str:
    """List the most frequent classes of modules, for a message."""
    kinds: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name and has_parameters(module):  # "" is the model itself, which does not repeat
            kinds[class_name(module)] += 1
    return join_counts(kinds.most_common(8)) or "none (no submodule has parameters)"


def join_counts(counts: Iterable[tuple[str, int]]) -> str:
    """Join classes and how often each occurs, for a message: "Linear ×4, ReLU ×2"."""
    return ", ".join(f"{kind} ×{count}" for kind, count in counts)


def class_name(thing: object) -> str:
    """Return the name of an object's class."""
    return type(thing).__name__


def class_if_imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of a module that may not be installed, or is slow to import, for ``isinstance``.

    Empty where nothing has imported the module: then nothing can be of that class.

    Example:
        >>> isinstance(nn.Linear(1, 1), class_if_imported("torch.nn", "Linear")), class_if_imported("never", "Seen")
        (True, ())
    """
    if module not in sys.modules:
        return ()
    return (getattr(sys.modules[module], name),)


def modules_of(model: nn.Module, kind: type[M] | tuple[type[M], ...]) -> Iterator[M]:
    """Yield the modules of a class or of one of several, ``model`` itself among them."""
    for module in model.modules():
        if isinstance(module, kind):
            yield module


def has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def modules_inside(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Return all modules in any of ``roots``, which are included."""
    found: set[nn.Module] = set()
    for root in roots:
        found.update(root.modules())
    return found


def list_names_above(name: str) -> list[str]:
    """Return the names of the modules that hold ``name``, from the outermost to the innermost.

    Example:
        >>> list_names_above("blocks.0.weight")
        ['blocks', 'blocks.0']
    """
    return [name[:i] for i, letter in enumerate(name) if letter == "."]


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Check whether ``name`` is that of a part of one of the ``modules``."""
    return any(map(modules.__contains__, list_names_above(name)))


def is_part_of(name: str, modules: Collection[str]) -> bool:
    """Check whether ``name`` is one of the ``modules``, or inside of one; all names are inside of ``""``, the model."""
    return "" in modules or name in modules or is_inside(name, modules)


def keep_outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Keep the named modules that lie in no other of them."""
    kept: dict[str, nn.Module] = {}
    for name, module in modules.items():  # parents come before their children
        if not is_part_of(name, kept):
            kept[name] = module
    return kept


def find_skipped(model: nn.Module, skip: Blocks) -> set[str]:
    """Names of the modules that a user wants left as they are, and of all that lies inside of them."""
    modules = dict(model.named_modules())
    outer = select(model, as_list(skip), modules, "skip")
    return {name for name in modules if is_part_of(name, outer)}


def group_by_reason(left: Mapping[str, str]) -> dict[str, list[str]]:
    """Group the names of what was left as it was by the reason.

    Example:
        >>> group_by_reason({"head": "a head", "router": "skip", "score": "a head"})
        {'a head': ['head', 'score'], 'skip': ['router']}
    """
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    return reasons


def find_module(model: nn.Module, name: str, argument: str) -> nn.Module:
    """Return the module of this name; ``argument`` is the argument that an error names.

    Raises:
        ValueError: there is no such module; the message lists similar names, and the model's children.

    Example:
        >>> find_module(nn.Sequential(nn.Linear(2, 1)), "1", argument="head")
        Traceback (most recent call last):
        ...
        ValueError: head='1' in Sequential: no such module. Similar names are none; its children are 0.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=4, cutoff=0.3)
        children = ", ".join(dict(model.named_children())) or "none"
        way_out = f"Similar names are {', '.join(map(repr, near)) or 'none'}; its children are {children}"
        raise ValueError(explain(f"{argument}={name!r} in {type(model).__name__}", "no such module", way_out))
    return modules[name]
