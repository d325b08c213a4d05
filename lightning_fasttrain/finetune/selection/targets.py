"""Find the layers that adapters are added to, and name the weights that they would not cover."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dis import get_instructions
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.core.modules.select import (
    HUGGING_FACE_MODEL,
    Sharing,
    as_list,
    find_tuners,
    has_parameters,
    is_a,
    is_inside,
    is_linear,
    is_part_of,
    is_tuner,
    is_wanted,
    keep_outermost,
    layers_of,
    select,
    stands_for,
    walk_around,
)
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.finetune.selection.base_fingerprint import names_in, names_not_in
from lightning_fasttrain.finetune.selection.freezing import can_train

if TYPE_CHECKING:
    from peft import PeftConfig


Target = str | re.Pattern[str] | type[nn.Module]
Targets = Target | Iterable[Target]
ALL_LINEAR = "all-linear"


@check_arguments
def find_targets(model: nn.Module, targets: Targets = ALL_LINEAR) -> dict[str, nn.Module]:
    """Find the layers that ``targets`` selects.

    Args:
        model: any module; a layer that has an adapter already is matched as the original layer.
        targets: ``"all-linear"``, all linear layers except the heads
            (:func:`~lightning_fasttrain.finetune.find_heads`), descendants of ``nn.Linear`` that compute something
            else, as some routers do, and layers whose weights are read without calling them, as in a state-space
            mixer (Mamba); or one or several of: a qualified name or the end of one (``"attn.q_proj"``), a pattern in
            which ``*`` stands for one name and ``**`` for any number, a compiled regular expression for the complete
            name, a class, a class name.

    Returns:
        Qualified name → layer, in the order of ``model.named_modules()``. A layer that the model holds under several
        names is found by each, and returned under the first.

    Raises:
        ValueError: one of ``targets`` matches nothing (the message lists similar names and candidates), or a layer
            shares its weight with another one, from which the adapter would make it differ.
        TypeError: one of ``targets`` is none of the above.

    Example:
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(4, 1) for _ in range(2)], nn.Linear(4, 9))
        >>> list(find_targets(net))
        ['0.linear1', '0.linear2', '1.linear1', '1.linear2']
        >>> list(find_targets(net, ["1.linear2", nn.LayerNorm, re.compile(r"\\d")]))
        ['0', '0.norm1', '0.norm2', '1', '1.linear2', '1.norm1', '1.norm2', '2']
    """
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        layers = layers_of(model)  # a layer with an adapter is listed as the original layer
        heads = [*find_heads(model), *read_past(model)]
        linear = {name: layer for name, layer in layers.items() if name not in heads and is_linear(layer)}
        found = {name: layer for name, layer in linear.items() if is_product(layer)}
        if not found:
            why = f"{type(model).__name__} has no linear layer besides heads ({', '.join(heads) or 'none'})"
            way_out = f"Name the layers. Candidates: {list_layer_kinds(layers)}"
            raise ValueError(explain(f"targets='{ALL_LINEAR}'", why, way_out))
        return found
    wanted = as_list(targets)
    if not wanted:
        raise ValueError(explain("targets=[]", "an adapter needs at least one layer", f"Use '{ALL_LINEAR}'"))
    return find_layers(model, wanted, "targets")


def find_layers(model: nn.Module, wanted: Iterable[Target], argument: str) -> dict[str, nn.Module]:
    """Return the layers that names, patterns and classes mean, as :func:`find_targets` does.

    Raises:
        ValueError: one of them matches nothing; the message names ``argument``, which gave them.
    """
    layers = layers_of(model)
    all_names = {names[0]: names for names in Sharing(model).names.values()}

    def means(name: str, layer: nn.Module, target: Target) -> bool:
        return any(_is_target(one, layer, target) for one in all_names[name])

    return select(model, wanted, layers, argument, means, lambda _: list_layer_kinds(layers))


def is_product(layer: nn.Module) -> bool:
    """Check whether a linear layer computes x·Wᵀ + b, if its class has a forward of its own.

    Layers of quantisation libraries do, up to rounding, and are not tried.
    """
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    kind: Any = type(layer)
    is_own = isinstance(layer, nn.Linear) and kind.forward is not nn.Linear.forward
    is_own = is_own and kind.__module__.partition(".")[0] not in ("bitsandbytes", "torch", "torchao")
    if not is_own or weight is None or type(weight) not in (nn.Parameter, FakeTensor):
        return True
    if weight.shape != (layer.out_features, layer.in_features):  # packed, or partitioned over ranks
        return True
    x = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device).view(2, -1).to(weight.dtype)
    try:
        with torch.no_grad(), keep_random_state():
            output, expected = kind.forward(layer, x), F.linear(x, weight, bias)
    except Exception:
        return False  # it needs inputs of another shape
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return False
    if isinstance(output, FakeTensor) or output.is_meta:
        return True
    return bool((output - expected).norm() <= _ROUNDING * expected.norm())


def _is_target(name: str, layer: nn.Module, target: Target) -> bool:
    if isinstance(target, re.Pattern):
        return target.fullmatch(name) is not None
    return is_wanted(name, layer, target) or (isinstance(target, str) and has_ending(name, [target]))


def has_ending(name: str, ends: Iterable[str]) -> bool:
    """Check whether the last parts of a name are one of ``ends``, as PEFT selects layers."""
    return any(f".{name}".endswith(f".{end}") for end in ends)


def find_target_parameters(model: nn.Module, ends: Iterable[str]) -> dict[str, str]:
    """Find tensors that a module itself multiplies with, such as stacks of experts, by the ends of their names.

    Returns:
        Qualified name of the tensor → qualified name of its module.

    Raises:
        ValueError: one of ``ends`` matches nothing, or the model itself holds the tensor.
    """
    owners: dict[str, nn.Module] = {}
    for name, module in {"": model, **layers_of(model)}.items():
        held = [child for child, layer in module.named_children() if stands_for(layer)]
        for key in (*dict(module.named_parameters(recurse=False)), *held):
            owners[f"{name}.{key}".removeprefix(".")] = module
    found = select(model, ends, owners, "target_parameters", lambda name, _, end: has_ending(name, [end]))
    for tensor in found:
        if "." not in tensor:
            why = "it belongs to the model itself, not to a submodule"
            raise ValueError(explain(f"target_parameters={tensor!r}", why, "Name a tensor of a submodule"))
    return {tensor: tensor.rpartition(".")[0] for tensor in found}


def refuse_tied(model: nn.Module, names: Collection[str], *, together: bool = False) -> None:
    """Refuse modules that share memory with another module, since an adapter would make the two differ.

    Args:
        names: first names of the modules. A module under several names has one adapter, which acts under all of them.
        together: whether modules may share with one another, as copies that train in full are tied again.

    Raises:
        ValueError: a module is tied; the message names both.
    """
    sharing, modules = Sharing(model), dict(model.named_modules())
    units = [list(names)]
    if not together:
        units = [[name] for name in names]
    for unit in units:
        inside = list(map(modules.__getitem__, unit))
        places = sharing.places(inside)
        for group in sharing.inside(inside):
            mine = next(key for key in group if is_part_of(key, places))
            # Copies of parameters that are views of one tensor would have separate memory.
            apart = [key for key in group if not is_part_of(key, places) or group[key] is not group[mine]]
            if apart:
                (owner, own), (other, _) = owner_of(mine), owner_of(apart[0])
                why = f"it shares its {own} with '{other}', and an adapter would make the two differ"
                way_out = "Leave it out of the targets, or untie the two first"
                if together:
                    owners = {model.get_submodule(key.rpartition(".")[0]): owner_of(key)[0] for key in reversed(group)}
                    tied = ", ".join(map(repr, reversed(owners.values())))
                    way_out = f"Leave it out of train=, or name all there, where they stay tied: {tied}"
                raise ValueError(explain(f"target '{owner}'", why, way_out))


def owner_of(parameter: str) -> tuple[str, str]:
    """Return the name of the module that holds a parameter, without adapters, and the parameter's own name."""
    owner, _, own = re.sub(r"\.(token_adapter|base_layer|original_module)(?=\.)", "", parameter).rpartition(".")
    return owner, own


def shortest_names(names: Collection[str], model: nn.Module) -> list[str] | str:
    """Return the shortest list of name endings that selects exactly these layers of ``model``, for adapter files.

    PEFT selects a layer if its name is an entry of the list, or ends with a dot and an entry. If no list of endings
    selects exactly these layers, a regular expression is returned.
    """
    return shortest_ends(names, dict(model.named_modules())) or match_exactly(names)


def match_exactly(names: Iterable[str]) -> str:
    """Return a regular expression for these names alone; as a list, PEFT would also take others that end like them."""
    return "|".join(map(re.escape, names))


def shortest_ends(names: Collection[str], everything: Collection[str]) -> list[str]:
    """Return the shortest list of name endings that selects exactly ``names``; empty if none does."""
    # Even complete names may select more than these, if other names end like one of them.
    for parts in range(1, 1 + max((name.count(".") + 1 for name in names), default=0)):
        candidate = {".".join(name.split(".")[-parts:]) for name in names}
        if {name for name in everything if has_ending(name, candidate)} == set(names):
            return sorted(candidate)
    return []


def list_layer_kinds(layers: dict[str, nn.Module]) -> str:
    """List the kinds of layers by the last part of their names, for a message."""
    kinds: Counter[str] = Counter()
    for name, layer in layers.items():
        if has_parameters(layer, recurse=False):
            kinds[f"{name.rpartition('.')[2]} ({type(layer).__name__})"] += 1
    return ", ".join(f"{kind} ×{count}" for kind, count in kinds.most_common(12)) or "none"


def find_hugging_face_model(
    model: nn.Module, what: str, why: str, way_out: str, of_several: str, *kinds: str
) -> tuple[str, Any]:
    """Return the name of the one Hugging Face model in ``model``, or of a module of other ``kinds`` around it, and it.

    Args:
        model: any module.
        what, why, way_out: what needs the model, why it needs one, and what to do without one.
        of_several: what to do with several; ``{}`` is the name of the first.
        kinds: further classes to find.

    Raises:
        TypeError: there is none.
        ValueError: there are several.
    """
    wanted = {name: module for name, module in model.named_modules() if is_a(module, HUGGING_FACE_MODEL, *kinds)}
    found = keep_outermost(wanted)
    if not found:
        raise TypeError(explain(what, f"it holds no Hugging Face model, {why}", way_out))
    if len(found) > 1:
        why = f"it holds several Hugging Face models: {', '.join(map(repr, found))}"
        raise ValueError(explain(what, why, of_several.format(next(iter(found)))))
    return next(iter(found.items()))


def require_peft() -> Any:
    """Import PEFT, or raise an error that names the extra which installs it."""
    return require("peft", extra="finetune")


def method_of(config: "PeftConfig") -> str:
    """Return PEFT's name of the method that a configuration is for, such as "LORA"; "" for the base class."""
    return getattr(config.peft_type, "value", "")


_READS = ("LOAD_ATTR", "LOAD_METHOD")
_ROUNDING = 0.1  # of an output's size
_MUCH = 0.1  # of all bytes: then it is worth a warning


def read_past(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose weights are read without calling them, so adapters have no effect.

    Among them are those of state-space models (Mamba): on a CPU some of these are called, on CUDA only ``in_proj`` is.
    """
    found: list[str] = []
    for above, module in model.named_modules():
        is_mixer, readers = "A_log" in module._parameters, _attributes_of_layers(type(module))
        for name, child in module.named_children():
            is_called = not readers.get(name, {""}) <= {"weight", "weight.dtype", "bias"}
            if is_linear(child) and (not is_called or (is_mixer and name != "in_proj")):
                found.append(f"{above}.{name}".lstrip("."))
    return found


def read_besides(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose weight, or its dtype, the code of the module that calls them reads too.

    A weight that is packed in bytes would do as neither. FlashAttention's classes read the dtype for other reasons.
    """
    found: list[str] = []
    for above, module in model.named_modules():
        readers = _attributes_of_layers(type(module))
        if "Flash" in type(module).__name__:
            continue
        for name, child in module.named_children():
            if is_linear(child) and readers.get(name, set()) & {"weight", "weight.dtype"}:
                found.append(f"{above}.{name}".lstrip("."))
    return found


@functools.cache
def _attributes_of_layers(kind: type[nn.Module]) -> dict[str, set[str]]:
    """Map what a module's forward takes of itself, such as ``q_proj``, to what it reads of that; "" for a call."""
    read: dict[str, set[str]] = {}
    if kind.__module__.startswith("torch."):  # whose kernels for inference read weights of layers that training calls
        return read
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        method: Any = getattr(kind, name, None)
        if name in seen or not callable(method) or not isinstance(method := inspect.unwrap(method), FunctionType):
            continue
        seen.add(name)
        for code in _codes_in(method.__code__):
            waiting += code.co_names
            names: list[str | None] = []
            for instruction in get_instructions(code):
                names.append(instruction.argval if instruction.opname in _READS else None)
            for first, second, third in zip(names, [*names[1:], None], [*names[2:], None, None], strict=True):
                if first is not None:
                    of_weight = second == "weight" and third in ("dtype", "device")
                    read.setdefault(first, set()).add(f"weight.{third}" if of_weight else second or "")
    return read


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def out_of_reach(model: nn.Module, skipped: Collection[str] = ()) -> dict[str, str]:
    """Map each layer or tensor that holds a matrix and is neither ``nn.Linear`` nor an embedding to a description."""
    adapters = list(find_tuners(model))
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | nn.Embedding | nn.EmbeddingBag)
            or name in skipped
            or is_inside(name, adapters)
        ):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter):
                kind = type(module).__name__
                named, why = f"{name}.{key}".lstrip("."), f"it is a tensor of {kind}"
                if key == "weight":
                    named, why = name, f"it is a {kind}"
                found[named] = f"{why}, not an nn.Linear"
    return found


def is_matrix(parameter: nn.Parameter) -> bool:
    """Check whether a parameter maps vectors to vectors; position embeddings [1, n, d] do not."""
    return can_train(parameter) and parameter.ndim > 1 and parameter.shape[0] > 1


def shares_of(model: nn.Module, names: Collection[str]) -> dict[str, float]:
    """Return the share of each layer or tensor in the bytes of all parameters."""
    total = bytes_of(model.parameters())
    parts = dict(model.named_modules())
    sizes = {}
    for name in names:
        own = parts[name].parameters() if name in parts else [model.get_parameter(name)]
        sizes[name] = bytes_of(own) / max(total, 1)
    return sizes


def warn_of_what_is_out_of_reach(model: nn.Module, left: Collection[str], shares: dict[str, float]) -> None:
    """Warn if at least 10% of the bytes are in matrices that are not quantised since they are in no linear layer."""
    names = names_in(out_of_reach(model), left)
    if (share := sum(map(shares.__getitem__, names))) >= _MUCH:
        what = f"{share:.0%} of the bytes of {type(model).__name__} stay in full precision"
        why = f"only nn.Linear is quantised, and these are in other modules: {list_some(names)}"
        warn(explain(what, why, "Plan for their size; model.bfloat16() halves that of float32 weights"))


def describe_uncovered(model: nn.Module, adapted: Collection[str]) -> str:
    """Report the parts of the model, if large, that have no adapter since they are in no linear layer."""
    stacks = [name for name, module in walk_around(model, is_tuner) if stands_for(module)]  # quantised, of matrices
    names = names_not_in([*out_of_reach(model), *stacks], adapted)
    share = sum(shares_of(model, names).values())
    passed = names_not_in(read_past(model), adapted)
    said = ""
    if share >= _MUCH:
        said += f"; without adapter, since not in a linear layer: {list_some(names)} ({share:.0%} of all bytes)"
    if passed:
        said += f"; without adapter, since their weights are read without calling them: {list_some(passed)}"
    return said
