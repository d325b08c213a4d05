"""Say in words what an annotation accepts, and of what kind a value is."""

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin


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
    return f"a list of {element}"


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
