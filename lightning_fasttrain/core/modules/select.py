"""Select modules and parameters by class, kind of layer, any of their names or a pattern, and list what is shared."""

import difflib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from torch import nn

from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.state.values import memory_of

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
            why, way_out = _say_why_nothing_matches(model, str(word), places, list_candidates or list_kinds)
            raise ValueError(explain(f"{what} matches nothing in {type(model).__name__}", why, way_out))
        found |= matched
    return {name: module for name, module in places.items() if name in found}


def _say_why_nothing_matches(
    model: nn.Module, word: str, places: Mapping[str, nn.Module], list_candidates: Callable[[nn.Module], str]
) -> tuple[str, str]:
    """Return the reason and the way out."""
    ending = [name for name in places if name.endswith(f".{word}")]
    if ending:
        why = f"a name is given in full, and {list_some(ending)} only end in it"
        return why, f"Give one of these, or the pattern '**.{word}'"
    kinds = set(map(class_name, model.modules()))
    ends = {name.rpartition(".")[2] for name in places}
    near = difflib.get_close_matches(word, [*filter(None, {*places, *ends}), *kinds], n=4, cutoff=0.5)
    way_out = f"Similar names: {', '.join(near) or 'none'}. Give a name, a pattern such as 'blocks.*', or a class"
    return f"candidates are {list_candidates(model)}", way_out


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
    """Return all names of the modules that a user wants left as they are, and of all that lies inside of them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    inside = modules_inside(select(model, as_list(skip), modules, "skip").values())
    return {name for name, module in modules.items() if module in inside}


class Sharing:
    """All names of a model's modules, and of its parameters that several names or overlapping memory share.

    BART's embedding, for example, is one module in three places after ``resize_token_embeddings``, and the weight of a
    tied head is that of the embedding.

    Attributes:
        names: module → all its names; the first is the one that ``model.named_modules()`` lists.
        groups: all names of each parameter that has several, together with those of other parameters in the same
            memory, such as views.

    Example:
        >>> net = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
        >>> net["head"].weight, net["again"] = net["embed"].weight, net["head"]
        >>> sharing = Sharing(net)
        >>> sharing.names[net["again"]], sharing.outside([net["again"]])
        (['head', 'again'], ['embed.weight'])
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        self.groups = _group_by_memory(dict(model.named_parameters(remove_duplicate=False)))
        self._inside: dict[str, set[int]] = {}  # name of a module → numbers of the groups inside of it
        for number, group in enumerate(self.groups):
            for name in group:
                for above in ("", *list_names_above(name)):
                    self._inside.setdefault(above, set()).add(number)

    def places(self, modules: Iterable[nn.Module]) -> set[str]:
        """Return all names of these modules."""
        return {name for module in modules for name in self.names[module]}

    def inside(self, modules: Iterable[nn.Module]) -> list[dict[str, nn.Parameter]]:
        """Return the groups of which a parameter lies in one of these modules."""
        found = {number for place in self.places(modules) for number in self._inside.get(place, ())}
        return [self.groups[number] for number in sorted(found)]

    def outside(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of parameters outside of these modules that share memory with a parameter inside."""
        places = self.places(modules)
        return [name for group in self.inside(modules) for name in group if not is_part_of(name, places)]


def _group_by_memory(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Return the parameters that overlap in memory with another name's, in groups; each is in the model's order."""
    memory = {name: memory_of(parameter) for name, parameter in parameters.items()}
    groups: list[list[str]] = []
    last, reached = 0, 0
    for name in sorted(memory, key=memory.__getitem__):
        storage, start, end = memory[name]
        if storage != last or start >= reached:
            groups.append([])
            last, reached = storage, end
        groups[-1].append(name)
        reached = max(reached, end)
    group_of = {name: i for i, group in enumerate(groups) for name in group if len(group) > 1}
    found: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if name in group_of:
            found.setdefault(group_of[name], {})[name] = parameter
    return list(found.values())


Places = list[tuple[nn.Module, str, nn.Module]]


def list_places(model: nn.Module) -> Places:
    """List every place of every module: the module that holds it, its name there, and the module itself."""
    found: Places = []
    for parent in model.modules():
        found += [(parent, name, child) for name, child in parent._modules.items() if child is not None]
    return found


def replace_modules_(places: Places, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement in all places of the module that it replaces.

    Args:
        places: the places from before the first replacement, which may hold what it replaces.
        replacements: module → the one to put in its places.

    Example:
        >>> net = nn.ModuleDict({"up": nn.Linear(2, 2)})
        >>> net["down"] = net["up"]
        >>> replace_modules_(list_places(net), {net["up"]: nn.ReLU()})
        >>> net["up"] is net["down"], net["down"]
        (True, ReLU())
    """
    for parent, name, child in places:
        if child in replacements:
            parent._modules[name] = replacements[child]


def spread_replacements_(places: Places) -> None:
    """Put what has replaced a module in one of these places in its other places too, if it was put in the first only.

    Args:
        places: the places from before the replacement.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for parent, name, child in places:
        now = parent._modules.get(name)
        if now is not None and now is not child:
            replaced.setdefault(child, now)
    replace_modules_(places, replaced)


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
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=4, cutoff=0.3)
        children = ", ".join(dict(model.named_children())) or "none"
        way_out = f"Similar names are {', '.join(map(repr, near)) or 'none'}; its children are {children}"
        raise ValueError(explain(f"{argument}={name!r} in {type(model).__name__}", "no such module", way_out))
    return modules[name]


TUNER = "peft.tuners.tuners_utils.BaseTunerLayer"
WRAPPER = "peft.utils.other.AuxiliaryTrainingWrapper"  # around a module that trains in full, or single rows of it
PROMPT_ENCODER = "peft.tuners.tuners_utils.BasePromptEncoder"
HUGGING_FACE_MODEL = "transformers.modeling_utils.PreTrainedModel"
CONV1D = "transformers.pytorch_utils.Conv1D"


def find_imported_class(name: str) -> type[Any] | None:
    """Return the class of this dotted name; None while its file has not been imported.

    Until then no module can be an instance of it, so optional packages are never imported for the question.

    Example:
        >>> find_imported_class("torch.nn.Linear"), find_imported_class("nowhere.Linear")
        (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    home, _, own = name.rpartition(".")
    return getattr(sys.modules.get(home), own, None)


def is_a(module: object, *names: str) -> bool:
    """Check whether a module or tensor is an instance of one of these classes of optional packages.

    Example:
        >>> is_a(nn.Linear(1, 1), TUNER, "torch.nn.Linear")
        True
    """
    kinds = filter(None, map(find_imported_class, names))
    return isinstance(module, tuple(kinds))


def is_tuner(module: object) -> bool:
    """Check whether ``module`` is one of PEFT's layers, which holds the layer that it adapts."""
    return is_a(module, TUNER)


def find_tuners(model: nn.Module) -> dict[str, Any]:
    """Map qualified names to PEFT's layers in ``model``, also to those inside others."""
    return {name: module for name, module in model.named_modules() if is_tuner(module)}


def walk_around(model: nn.Module, closed: Callable[[nn.Module], bool]) -> Iterator[tuple[str, Any]]:
    """Iterate over names and modules as ``named_modules`` does, without those inside of modules that are ``closed``.

    The model itself is always entered.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
        >>> [name for name, _ in walk_around(net, lambda module: isinstance(module, nn.Sequential))]
        ['', '0', '1']
    """
    inside = "\0"  # no name begins with it
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if closed(module):
            inside = f"{name}."
        yield name, module


def base_of(module: nn.Module) -> nn.Module:
    """Return the layer under an adapter, or the module itself."""
    return cast(Any, module).get_base_layer() if is_tuner(module) else module


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name → module, without what an adapter brought; an adapted layer is represented by its base."""
    found: dict[str, nn.Module] = {}
    for name, module in walk_around(model, lambda module: is_a(module, TUNER, PROMPT_ENCODER)):
        if name and not stands_for(module) and not is_a(module, PROMPT_ENCODER):
            found[name] = base_of(module)
    return found


def is_linear(layer: nn.Module) -> bool:
    """Check whether ``layer`` is an ``nn.Linear``, a quantised descendant of it, or GPT-2's transposed one.

    Those inside ``nn.MultiheadAttention`` are not, since it computes with their weights and never calls them.
    """
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear) or stands_for(layer):
        return False
    return isinstance(layer, nn.Linear) or is_a(layer, CONV1D)


def stands_for(layer: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of the tensor that a quantised layer holds for another module, which alone uses it; else None.

    By ``vars``: an adapter's wrapper passes on the attributes of the layer that it holds.
    """
    return vars(layer).get("stands_for")
