"""Compare a value with the annotation of an argument, convert it to plain Python, and describe what was expected."""

import functools
import inspect
import itertools
import math
import operator
import os
import re
import string
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from lightning_fasttrain.core.messages import number_of


@dataclass(frozen=True, repr=False)
class Bounds:
    """Limits of a number, beside its type: ``Annotated[int, Bounds(1)]``.

    Example:
        >>> Bounds(0, 1), Bounds(0, excluded=True)
        (between 0 and 1, greater than 0)
    """

    low: float
    high: float = math.inf
    excluded: bool = False  # the lower limit itself

    def allow(self, value: Any) -> bool:
        """Check whether a number lies within the limits."""
        return self.low <= value <= self.high and not (self.excluded and value == self.low)

    def __repr__(self) -> str:  # in words, as help() shows it beside the argument
        if self.high < math.inf and self.excluded:
            return f"above {self.low:g} and at most {self.high:g}"
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        if self.excluded:
            return f"greater than {self.low:g}"
        return f"at least {self.low:g}"


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
PositiveFloat = Annotated[float, Bounds(0, excluded=True)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]
PositiveShare = Annotated[float, Bounds(0, 1, excluded=True)]

# Arguments of other places that users pass as a batch, by the module and the name of a base class, since the check must
# not import what it knows of; and what to pass instead.
_PASS_BATCH = "Pass a batch of your DataLoader, or the DataLoader itself"
_NO_BATCHES = {
    ("torch.nn.modules.module", "Module"): _PASS_BATCH,
    ("torch.optim.optimizer", "Optimizer"): _PASS_BATCH,
    ("torch.utils.data.dataset", "Dataset"): "Pass DataLoader(dataset, batch_size=...)",
    ("datasets.arrow_dataset", "Dataset"): "Pass DataLoader(dataset, batch_size=...)",
    ("lightning.pytorch.core.datamodule", "LightningDataModule"): "Pass its train_dataloader()",
    ("lightning.pytorch.callbacks.callback", "Callback"): f"{_PASS_BATCH}, and techniques=[...] besides",
}


class AnyBatch:
    """Annotation of a batch: anything that a loader may yield, but nothing that belongs to another argument.

    Example:
        >>> find_problem(Batch, 8).why
        'expected a batch or a DataLoader, got a whole number'
    """

    def find_problem(self, value: object) -> "Problem | None":
        """Return why a value cannot be a batch; None if it may be one."""
        if value is None or isinstance(value, int):
            return self._refuse(value, _PASS_BATCH)
        first = value[0] if isinstance(value, list | tuple) and value else value
        for base in type(first).__mro__:
            way_out = _NO_BATCHES.get((base.__module__, base.__name__))
            if way_out is not None:
                return self._refuse(value, way_out)
        return None

    def _refuse(self, value: Any, way_out: str) -> "Problem":
        got = describe_kind(value)
        if isinstance(value, list | tuple):
            got = f"a list of {type(value[0]).__name__} objects"
        return Problem(f"expected a batch or a DataLoader, got {got}", way_out)

    def __repr__(self) -> str:  # in words, as help() shows it beside the argument
        return "a batch"


Batch = Annotated[object, AnyBatch()]


@dataclass(frozen=True)
class Problem:
    """Description of a wrong value.

    Attributes:
        reason: why it is refused, or a function that says so: of a union, most members refuse most values in vain.
        way_out: what to pass instead; "" if nothing better is known than the default.
        kind: class of the error.
    """

    reason: str | Callable[[], str]
    way_out: str = ""
    kind: type[Exception] = TypeError

    @property
    def why(self) -> str:
        if isinstance(self.reason, str):
            return self.reason
        return self.reason()


def find_problem(annotation: object, value: object) -> Problem | None:
    """Return what is wrong with a value for an argument annotated so; None if nothing is.

    Stricter than ``isinstance`` where mistakes are common: True is not a number, numbers are finite, one string is
    not a list of strings, and an empty string is neither a name nor a path. Elements are checked in built-in
    containers only, since others may be iterated once. What cannot be checked is accepted.

    Example:
        >>> find_problem(PositiveInt | Literal["auto"], 4)
        >>> find_problem(PositiveInt | Literal["auto"], 0).why
        'it must be at least 1'
        >>> find_problem(PositiveInt | Literal["auto"], "4").why
        "expected a whole number or 'auto', got a string"
    """
    origin = get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        return _find_in_union(annotation, value)
    check = _CHECKS.get(origin or annotation, _find_in_object)
    return check(annotation, value)


def _expected(annotation: object, value: object, way_out: str = "") -> Problem:
    def reason() -> str:
        words = describe_kind(value)
        if isinstance(value, bool):
            words = repr(value)
        return f"expected {describe_annotation(annotation)}, got {words}"

    return Problem(reason, way_out)


def _find_in_union(annotation: object, value: object) -> Problem | None:
    members = list_members(annotation)
    if isinstance(value, str) and any(_name(member) == "device" for member in members):
        return _find_in_device(value)
    problems = []
    for member in members:
        problem = find_problem(member, value)
        if problem is None:
            return None
        problems.append(problem)
    numeric = any(describe_annotation(member) in ("a number", "a whole number") for member in members)
    if isinstance(value, str) and numeric and _NUMBER.fullmatch(value):
        return _expected(annotation, value, _as_number(value))
    # A value of the right kind has the better reason: a bound it breaks, a wrong entry, a word that is no choice.
    for problem in problems:
        if problem.why == _UNKNOWN:
            return Problem(f"expected {describe_annotation(annotation)}", "", ValueError)
        if problem.kind is ValueError or problem.why.startswith((_ENTRY, _CALLED)):
            return problem
    hint = next((problem.way_out for problem in problems if problem.way_out), "")
    return _expected(annotation, value, hint)


_UNKNOWN, _ENTRY, _CALLED = "not a known choice", "entry", "it is called with"
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")
_WITH_UNIT = re.compile(r"\d+(\.\d*)? ?[a-zA-Z]{1,5}")


def _find_in_device(name: str) -> Problem | None:
    if name == "gpu":  # Lightning's word for it
        return Problem("torch has no device of this name", "Use 'cuda'", ValueError)
    try:
        sys.modules["torch"].device(name)  # the annotation has imported it
    except RuntimeError:
        return Problem("torch has no device of this name", "Use 'cuda', 'cuda:1', 'cpu' or 'mps'", ValueError)
    return None


def _find_in_annotated(annotation: object, value: object) -> Problem | None:
    base, *limits = get_args(annotation)
    problem = find_problem(base, value)
    for limit in limits:
        if problem is None and isinstance(limit, Bounds) and not limit.allow(value):
            problem = Problem(f"it must be {limit}", "", ValueError)
        if problem is None and isinstance(limit, AnyBatch):
            problem = limit.find_problem(value)
    return problem


def _find_in_int(annotation: object, value: object) -> Problem | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return None
    return _expected(annotation, value, _convert(value))


def _find_in_float(annotation: object, value: object) -> Problem | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return _expected(annotation, value, _convert(value))
    if isinstance(value, float) and not math.isfinite(value):
        return Problem("it must be a finite number", "", ValueError)
    return None


def _convert(value: object) -> str:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return _as_number(value)
    if isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        return "Write the number alone, in the unit that the argument has"
    if not isinstance(value, Real) or isinstance(value, int | float):
        return ""
    if isinstance(value, Integral):
        return f"Use int({value})"
    return f"Use float({value})"


def _as_number(text: str) -> str:
    mantissa, e, exponent = text.lower().partition("e")
    if e and "." not in mantissa:
        mantissa = f"{mantissa}.0"  # YAML reads 1e-3 as a string
    if e:
        text = f"{mantissa}e{int(exponent):+d}"
    return f"Write the number without quotes: {text}"


def _find_in_str(annotation: object, value: object) -> Problem | None:
    if not isinstance(value, str):
        way_out = ""
        if type(value).__name__ == "dtype":
            way_out = f"Use its name, {str(value).removeprefix('torch.')!r}"
        return _expected(annotation, value, way_out)
    if not value:
        return Problem("an empty string means nothing here", "", ValueError)
    return None


def _find_in_literal(annotation: object, value: object) -> Problem | None:
    choices = get_args(annotation)
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return None
    words = ", ".join(map(repr, choices))
    if isinstance(value, str):
        return Problem(_UNKNOWN, f"Use one of {words}", ValueError)
    return _expected(annotation, value)


def _find_in_class(annotation: object, value: object) -> Problem | None:
    (wanted,) = get_args(annotation) or (object,)
    if isinstance(value, type):
        if not isinstance(wanted, type) or issubclass(value, wanted):
            return None
        return _expected(annotation, value)
    hint = ""
    if isinstance(wanted, type) and isinstance(value, wanted):
        hint = f"Use its class, {type(value).__name__}"
    return _expected(annotation, value, hint)


def _find_in_function(annotation: object, value: object) -> Problem | None:
    if not callable(value):
        return _expected(annotation, value)
    wanted, *_ = get_args(annotation) or (...,)
    if not isinstance(wanted, list):  # any arguments
        return None
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of a function in C, say
        return None
    try:
        signature.bind(*wanted)
    except TypeError:
        return _explain_call(value, signature, len(wanted))
    return None


def _explain_call(function: Any, signature: inspect.Signature, number: int) -> Problem:
    arguments = number_of(number, "argument")
    name = getattr(function, "__name__", type(function).__name__)
    way_out = f"Wrap it: lambda: {name}(...)"
    if name == "<lambda>":
        way_out = f"Write it for {arguments}"
    elif number:
        passed = ", ".join(string.ascii_lowercase[:number])
        way_out = f"Wrap it: lambda {passed}: {name}({passed}, ...)"
    takes = ", ".join(signature.parameters) or "none"
    return Problem(f"{_CALLED} {arguments}, and takes {takes}", way_out)


def _find_in_container(annotation: Any, value: object) -> Problem | None:
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    anything = not inner or inner[0] is Any
    # A Sequential can be iterated too, but over its modules, which is never meant.
    if callable(getattr(value, "parameters", None)) and not anything:
        if "Tensor" in str(inner[0]) or "Parameter" in str(inner[0]):
            return _expected(annotation, value, "Pass its parameters()")
        return _expected(annotation, value)
    is_other = isinstance(value, str | bytes) or (isinstance(value, Mapping) and not anything)
    if is_other or not isinstance(value, kind):
        if not anything and find_problem(inner[0], value) is None:
            return _expected(annotation, value, "Put it into a list: [...]")
        return _expected(annotation, value)
    if inner and isinstance(value, list | tuple | set | frozenset | dict):
        return _first_problem(inner[0], value)
    return None


def _find_in_tuple(annotation: object, value: object) -> Problem | None:
    inner = get_args(annotation)
    if not isinstance(value, list | tuple):
        return _expected(annotation, value)
    if inner[-1] is ...:
        return _first_problem(inner[0], value)
    if len(value) != len(inner):
        return Problem(f"expected {len(inner)} values, got {len(value)}", "", ValueError)
    for place, (wanted, one) in enumerate(zip(inner, value, strict=True)):
        problem = _first_problem(wanted, [one], place)
        if problem is not None:
            return problem
    return None


def _first_problem(annotation: object, values: Iterable[object], first: int = 0) -> Problem | None:
    for place, value in enumerate(values, first):
        problem = find_problem(annotation, value)
        is_root = isinstance(value, str) and not value  # the name of the model itself among its modules
        if problem is not None and not is_root:
            return Problem(f"{_ENTRY} {place}: {problem.why}", problem.way_out, problem.kind)
    return None


def _find_in_mapping(annotation: object, value: object) -> Problem | None:
    if not isinstance(value, Mapping):
        return _expected(annotation, value)
    keys, values = get_args(annotation) or (Any, Any)
    return _first_problem(keys, list(value)) or _first_problem(values, list(value.values()))


def _accept(annotation: object, value: object) -> Problem | None:
    return None


def _find_in_object(annotation: object, value: object) -> Problem | None:
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False) or isinstance(value, kind):
        return None
    if isinstance(value, type) and issubclass(value, kind):
        return _expected(annotation, value, f"Make an object of it: {value.__name__}(...)")
    # By name, for the check must not import what it knows of.
    if kind.__name__ == "dtype" and isinstance(value, str):
        return _expected(annotation, value, "Use a dtype of torch or its name, such as 'bfloat16'")
    if (kind.__name__, type(value).__name__) == ("Module", "Trainer"):
        return _expected(annotation, value, "Pass the model, not the Trainer")
    if (kind.__name__, type(value).__name__) == ("Module", "generator"):
        return _expected(annotation, value, "Pass the model itself, not its parameters()")
    return _expected(annotation, value, find_place(value))


def find_place(value: object) -> str:
    """Return where a user's object belongs, in one sentence without a full stop, as its class says; else ""."""
    return getattr(type(value), "where_to_use", "")


_CHECKS: dict[Any, Callable[[Any, object], Problem | None]] = {
    **{Annotated: _find_in_annotated, Literal: _find_in_literal, type: _find_in_class, TypeVar: _accept},
    **{int: _find_in_int, float: _find_in_float, str: _find_in_str, Callable: _find_in_function},
    **{Any: _accept, object: _accept, tuple: _find_in_tuple},
    **dict.fromkeys((list, Sequence, Collection, Iterable, set, frozenset), _find_in_container),
    **dict.fromkeys((dict, Mapping), _find_in_mapping),
}


def to_plain(annotation: Any, value: Any) -> Any:
    """Return a setting in plain Python, as checkpoints, YAML files and other processes can hold it.

    NumPy's numbers become Python's, the name of a dtype becomes the dtype where the annotation allows one, and
    sequences and mappings of other classes, such as OmegaConf's, become lists and dicts; so do the elements of
    containers. A value that needs no change is returned itself. Batches, datasets and tensors are not settings:
    elements that are annotated as ``object`` or as tensors stay as they are, and so do those of a sequence of ``Any``.

    Args:
        annotation: of the argument; ``Any`` for a setting of unknown type.
        value: any value.

    Example:
        >>> from types import MappingProxyType
        >>> to_plain(Mapping[str, Any], MappingProxyType({"betas": (0.9, 0.95)}))
        {'betas': (0.9, 0.95)}
        >>> to_plain(Mapping[str, object], MappingProxyType({"batch": 1}))
        mappingproxy({'batch': 1})
    """
    convert = _conversion_of(type(value))
    if convert is None:
        return value
    return convert(annotation, value)


@functools.lru_cache(maxsize=1024)  # of types, which users may define anew
def _conversion_of(kind: type) -> Callable[[Any, Any], Any] | None:
    if issubclass(kind, getattr(sys.modules.get("numpy"), "generic", ())):
        return _to_number
    if kind is str:
        return _read_dtype
    if issubclass(kind, Mapping):
        return _to_dict
    if issubclass(kind, Sequence) and not issubclass(kind, str | bytes | bytearray | memoryview | range):
        return _to_list
    return None


def _to_number(annotation: object, value: Any) -> Any:
    return value.item()


def _read_dtype(annotation: object, word: str) -> Any:
    torch = sys.modules.get("torch")  # which an annotation with a dtype has imported
    if torch is None or torch.dtype not in list_members(annotation):
        return word
    found = getattr(torch, word.removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    return word


def _to_dict(annotation: object, value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    inner = _annotation_inside(annotation, Mapping)
    if inner is None:
        return value
    keys = [to_plain(Any, key) for key in value]
    values = [to_plain(inner, one) for one in value.values()]
    is_plain = isinstance(value, dict) and all(map(operator.is_, keys, value))
    if is_plain and all(map(operator.is_, values, value.values())):
        return value
    return dict(zip(keys, values, strict=True))


def _to_list(annotation: object, value: Sequence[Any]) -> Sequence[Any]:
    inner = _annotation_inside(annotation, Iterable)
    if inner is None:
        return value
    values = [to_plain(inner, one) for one in value]
    if isinstance(value, list | tuple) and all(map(operator.is_, values, value)):
        return value
    if isinstance(value, tuple):
        return tuple(values)
    return values


@functools.cache
def _annotation_inside(annotation: Any, kind: type) -> Any:
    """Return the annotation of a container's elements; None if they are not settings."""
    if annotation is Any:
        return Any
    elements = itertools.chain.from_iterable(_list_elements(member, kind) for member in list_members(annotation))
    settings = list(filter(_is_setting, elements))
    if not settings:
        return None
    return functools.reduce(operator.or_, settings)


def _list_elements(annotation: Any, kind: type) -> Iterable[Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if not isinstance(origin, type) or not issubclass(origin, kind):
        return ()
    if kind is Mapping:
        return inner[1:]
    if issubclass(origin, Mapping):
        return ()
    return [one for one in inner if one not in (..., Any)]


def _is_setting(annotation: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    return annotation is not object and not (isinstance(annotation, type) and issubclass(annotation, tensor))


def describe_annotation(annotation: object) -> str:
    """Say in words what an annotation accepts.

    Example:
        >>> describe_annotation(Iterable[str] | int | None)
        'a list of strings, a whole number or None'
    """
    *words, last = dict.fromkeys(map(_describe, list_members(annotation)))
    return " or ".join(filter(None, [", ".join(words), last]))


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
_SEVERAL = {"a string": "strings", "a whole number": "whole numbers", "a number": "numbers"}


@functools.cache
def list_members(annotation: object) -> list[Any]:
    """Return the alternatives of a union, and a union of only itself for anything else."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for one in get_args(annotation) for inner in list_members(one)]
    return [annotation]


def _describe(annotation: object) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(inner[0])
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin is type:
        return f"a class of {_name(inner[0])}"
    if kind_of_container := _describe_container(origin, inner):
        return kind_of_container
    if origin is Callable and inner[0] == []:
        return "a function without arguments"
    kind = origin or annotation
    words = {Callable: "a function", os.PathLike: "a path", **_WORDS}
    return words.get(kind) or _with_article(_name(kind))


def _describe_container(kind: object, inner: tuple[object, ...]) -> str:
    if not isinstance(kind, type) or not issubclass(kind, Iterable) or not inner:
        return ""
    if issubclass(kind, Mapping):
        return "a dict"
    if kind is tuple and inner[-1] is not ...:
        return f"{len(inner)} values"
    element = describe_annotation(inner[0])
    if " or " in element:
        return "a list"
    article, _, name = element.partition(" ")
    if article in ("a", "an"):
        element = _SEVERAL.get(element, f"{name} objects")
    return "a list" if element == "object objects" else f"a list of {element}"


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))


def _with_article(name: str) -> str:
    if name[:1] in "AEIOaeio":
        return f"an {name}"
    return f"a {name}"


def describe_kind(value: object) -> str:
    """Say of what kind a value is.

    Example:
        >>> describe_kind("4"), describe_kind(int), describe_kind(None)
        ('a string', 'the class int', 'None')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _WORDS.get(type(value)) or _with_article(type(value).__name__)
