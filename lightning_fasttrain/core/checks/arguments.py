"""Check the arguments of a call against the annotations of the function, with one form of error for all."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints, overload

from lightning_fasttrain.core.checks.annotations import Problem, find_problem

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LONGEST = 60  # characters of a value in a message


@overload
def check_arguments(function: _Function, /) -> _Function: ...
@overload
def check_arguments(**ways_out: str) -> Callable[[_Function], _Function]: ...
def check_arguments(function: Callable[..., object] | None = None, /, **ways_out: str) -> Any:
    """Refuse arguments that do not fit their annotations, before the function runs; for whatever users call.

    Decorates a function, or a class, whose ``__init__`` is then checked. Limits of numbers are part of the annotations:
    :data:`PositiveInt`, :data:`NonNegativeFloat`, :data:`Share`. A default is always accepted. The check takes
    some 10 µs a call, and none in code that is compiled.

    Args:
        function: the function or class.
        ways_out: by argument, what to do instead, where the message should say more than what was expected.

    Raises:
        TypeError: by the function: an argument is of another type, missing, or unknown.
        ValueError: by the function: a number is outside of its limits, or a word is not among the choices.

    Example:
        >>> from lightning_fasttrain.core.checks import PositiveInt
        >>> @check_arguments(n="Use n=1 to leave the batch unsplit")
        ... def split(n: PositiveInt) -> None: ...
        >>> split(0)
        Traceback (most recent call last):
        ValueError: split(n=0): it must be at least 1. Use n=1 to leave the batch unsplit.
    """
    if function is None:
        return functools.partial(_wrap, ways_out=ways_out)
    return _wrap(function, ways_out)


def _wrap(function: Any, ways_out: Mapping[str, str]) -> Any:
    if isinstance(function, type):
        function.__init__ = _wrap(function.__init__, ways_out)
        return function

    # Modules that use torch have imported it by now, and others must not because of a check.
    is_compiling: Callable[[], bool] = getattr(sys.modules.get("torch.compiler"), "is_compiling", bool)

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> Any:
        # A check that is traced would break the graph.
        if not is_compiling() and not _fit(_read(function), args, kwargs):
            name = function.__name__
            if name == "__init__":
                name = type(args[0]).__name__
            bind_arguments(function, name, ways_out, *args, **kwargs)
        return function(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a function, and the annotations of those that can be checked."""

    signature: inspect.Signature
    annotations: dict[str, Any]
    positional: tuple[str, ...]
    required: frozenset[str]


@functools.cache
def _read(function: Callable[..., object]) -> _Parameters:
    try:
        annotations = get_type_hints(function, include_extras=True)
    except NameError:  # of a name that only type checkers know, such as PEFT's
        annotations = {name: kind for name, kind in function.__annotations__.items() if not isinstance(kind, str)}
    checked = {name: kind for name, kind in annotations.items() if kind is not Any}
    signature, positional, required = inspect.signature(function), [], set()
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(name)
        if parameter.default is parameter.empty:
            required.add(name)
    return _Parameters(signature, checked, tuple(positional), frozenset(required))


def _fit(parameters: _Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether nothing is wrong with a call, in the short way; False where only binding its arguments can tell."""
    given = dict(zip(parameters.positional, args, strict=False)) | kwargs
    known = parameters.signature.parameters
    if len(given) < len(args) + len(kwargs) or not parameters.required <= given.keys() <= known.keys():
        return False
    for name, value in given.items():
        annotation = parameters.annotations.get(name)
        if annotation is not None and value is not known[name].default and find_problem(annotation, value) is not None:
            return False
    return True


def bind_arguments(
    function: Callable[..., object], name: str, ways_out: Mapping[str, str], /, *args: object, **kwargs: object
) -> inspect.BoundArguments:
    """Bind the arguments of a call to the parameters of ``function`` and check each against its annotation.

    Args:
        function: whose signature counts; of a method, ``self`` is among ``args``.
        name: of the callable, for messages.
        ways_out: as for :func:`check_arguments`.
        args, kwargs: of the call.

    Raises:
        TypeError, ValueError: as of :func:`check_arguments`.
    """
    elsewhere: Mapping[str, str] = {}
    if args:
        elsewhere = getattr(type(args[0]), "names_elsewhere", {})
    for word in kwargs.keys() & elsewhere.keys():
        raise TypeError(f"{name}({word}=...): that is another library's name for it. Use {elsewhere[word]}.")
    parameters = _read(function)
    try:
        bound = parameters.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}. {_list_parameters(parameters.signature, kwargs)}.") from None
    for word, value in bound.arguments.items():
        parameter = parameters.signature.parameters[word]
        if word not in parameters.annotations or value is parameter.default:
            continue
        problem = _find_any_problem(parameter, parameters.annotations[word], value)
        if problem is not None:
            raise problem.kind(_explain(name, parameter, value, problem, ways_out))
    return bound


def _find_any_problem(parameter: inspect.Parameter, annotation: object, value: Any) -> Problem | None:
    if parameter.kind is parameter.VAR_POSITIONAL:
        values = value
    elif parameter.kind is parameter.VAR_KEYWORD:
        values = value.values()
    else:
        values = (value,)
    for one in values:
        problem = find_problem(annotation, one)
        if problem is not None:
            return problem
    return None


def _explain(
    name: str, parameter: inspect.Parameter, value: object, problem: Problem, ways_out: Mapping[str, str]
) -> str:
    """Format the message: the call with the value, what is wrong with it, and what to write instead."""
    word = parameter.name
    way_out = problem.way_out or ways_out.get(word, "")
    if not way_out and parameter.default is parameter.empty:
        way_out = f"See help({name})"
    elif not way_out:
        way_out = f"Leave it out for the default, {word}={show(parameter.default)}"
    return f"{name}({word}={show(value)}): {problem.why}. {way_out}."


def show(value: object) -> str:
    """Return a value as text for a message: plain values as code, others by their class, since they may be large.

    Example:
        >>> show("4"), show([1, 2]), show(int), show(object())
        ("'4'", '[1, 2]', 'int', '<object>')
    """
    if isinstance(value, type):
        return value.__name__
    if value is None or isinstance(value, str | bytes | int | float | complex):
        text = repr(value)
    elif type(value) in (list, tuple, set, frozenset, dict):
        text = _show_container(value)
    else:
        text = f"<{type(value).__name__}>"
        if callable(value):
            text = getattr(value, "__name__", "") or text
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}…"


def _show_container(value: Any) -> str:
    plain = all(isinstance(one, str | int | float | None) for one in value)
    if plain and not isinstance(value, dict) and len(value) <= _LONGEST:
        return repr(value)
    return f"<{type(value).__name__} of {len(value)}>"


def _list_parameters(signature: inspect.Signature, given: Mapping[str, object]) -> str:
    names = [name for name in signature.parameters if name != "self"]
    if not names:
        return "It has no arguments"
    for word in given.keys() - signature.parameters.keys():
        near = difflib.get_close_matches(word, names, n=1)
        if near:
            return f"Did you mean {near[0]}? Its arguments are {', '.join(names)}"
    return f"Its arguments are {', '.join(names)}"
