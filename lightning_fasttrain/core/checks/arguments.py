"""Check the arguments of a call, single values and installed packages, with one form of error for all."""

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints, overload

from lightning_fasttrain.core.checks.annotations import Problem, find_problem, to_plain
from lightning_fasttrain.core.messages import quiet_libraries

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LONGEST = 60  # characters of a value in a message


@overload
def check_arguments(function: _Function, /) -> _Function: ...
@overload
def check_arguments(**ways_out: str) -> Callable[[_Function], _Function]: ...
def check_arguments(function: Callable[..., object] | None = None, /, **ways_out: str) -> Any:
    """Refuse arguments that do not fit their annotations, before the function runs; for whatever users call.

    Decorates a function, or a class, whose ``__init__`` is then checked. Limits of numbers are part of the annotations:
    :data:`PositiveInt`, :data:`NonNegativeFloat`, :data:`Share`. A default is always accepted. Settings in classes of
    OmegaConf or NumPy arrive in the function as plain Python, see ``to_plain``. The check takes some 10 µs a call, and
    none in code that is compiled.

    Args:
        function: the function or class.
        ways_out: by argument, what to do instead, where the message should say more than what was expected; also by
            another library's name of an argument, which the function does not have.

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
            bound = bind_arguments(function, name, ways_out, *args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
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
    """Check in the short way whether a call is right as it is; False where only binding its arguments can tell."""
    given = dict(zip(parameters.positional, args, strict=False)) | kwargs
    known = parameters.signature.parameters
    if len(given) < len(args) + len(kwargs) or not parameters.required <= given.keys() <= known.keys():
        return False
    for name, value in given.items():
        annotation = parameters.annotations.get(name)
        if annotation is None or value is known[name].default:
            continue
        if to_plain(annotation, value) is not value or find_problem(annotation, value) is not None:
            return False
    return True


def bind_arguments(
    function: Callable[..., object], name: str, ways_out: Mapping[str, str], /, *args: object, **kwargs: object
) -> inspect.BoundArguments:
    """Bind the arguments of a call to the parameters of ``function``; convert settings to plain Python and check them.

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
    for word in kwargs.keys() & (ways_out.keys() - parameters.signature.parameters.keys()):
        raise TypeError(f"{name}({word}=...): that is another library's name for it. {ways_out[word]}.")
    try:
        bound = parameters.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}. {_list_parameters(parameters.signature, kwargs)}.") from None
    for word, value in bound.arguments.items():
        parameter = parameters.signature.parameters[word]
        if value is parameter.default:
            continue
        annotation = parameters.annotations.get(word)
        bound.arguments[word] = value = _convert(parameter, annotation, value)
        if annotation is None:
            continue
        problem = _find_any_problem(parameter, annotation, value)
        if problem is not None:
            raise problem.kind(_explain(name, parameter, value, problem, ways_out))
    return bound


def _convert(parameter: inspect.Parameter, annotation: object, value: Any) -> Any:
    if parameter.kind is parameter.VAR_KEYWORD:
        return to_plain(Any, value)  # settings of something else, such as an optimizer
    if annotation is None:
        return value
    if parameter.kind is parameter.VAR_POSITIONAL:
        return tuple([to_plain(annotation, one) for one in value])
    return to_plain(annotation, value)


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


def positive_int(name: str, value: object) -> int:
    """Return ``value`` if it is a whole number of at least one.

    Raises:
        TypeError: not an ``int`` (a ``bool`` is none either).
        ValueError: smaller than one.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: it counts things, so it must be a whole number. Use {name}=1 or more.")
    if value < 1:
        raise ValueError(f"{name}={value}: it counts things, so it must be at least 1. Use {name}=1 or more.")
    return value


def real_number(name: str, value: object, example: float) -> None:
    """Refuse what is not a number, such as a string read from a file.

    Raises:
        TypeError: neither an ``int`` nor a ``float`` (a ``bool`` is none either).
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(
            f"{name}={value!r}: expected a number, got {type(value).__name__}. Use, for example, {name}={example}."
        )


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the ``allowed`` words.

    Raises:
        ValueError: it is not; the message lists the allowed ones.
    """
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}={value!r}: not a known choice. Use one of {words}.")
    return value


# Published with a credential stealer that ran on import (CVE-2026-44484).
_STOLE_CREDENTIALS = {"2.6.2", "2.6.3"}


def refuse_compromised_hosts() -> None:
    """Refuse to be imported beside a release of Lightning that is known to steal credentials.

    Reads the installed metadata only: the point is that nothing of the bad release has been imported yet.

    Raises:
        ImportError: ``lightning`` or ``pytorch_lightning`` is 2.6.2 or 2.6.3.
    """
    for package in ("lightning", "pytorch-lightning"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version in _STOLE_CREDENTIALS:
            raise ImportError(
                f"{package} {version}: this release ran a credential stealer when imported (CVE-2026-44484). "
                f"Rotate the secrets of this machine, then: pip install 'lightning>=2.6.6,<2.7'."
            )


@functools.cache
def read_bounds() -> dict[str, "SpecifierSet"]:
    """Return the versions of each package that this one's metadata asks for, extras included, as pip reads them.

    A package that it does not ask for may have any version.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    bounds: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    with suppress(importlib.metadata.PackageNotFoundError):  # a copy of the sources that is not installed
        for line in importlib.metadata.requires("lightning-fasttrain") or ():
            requirement = Requirement(line)
            bounds[requirement.name] &= requirement.specifier
    return bounds


@functools.cache
def list_untested() -> tuple[str, ...]:
    """Return a sentence for torch and for Lightning, of which private parts are used, if that version is untested."""
    found: list[str] = []
    for name in ("torch", "lightning"):
        version, bounds = importlib.metadata.version(name), read_bounds()[name]
        if not bounds.contains(version, prereleases=True):
            found.append(
                f"{name} {version} is not among the tested versions, {name}{bounds}. Techniques use private parts of "
                f"it. If one fails: pip install '{name}{bounds}'"
            )
    return tuple(found)


class NotACallback:
    """Base class of objects that users list among a Trainer's callbacks; the first hook says where they belong.

    Attributes:
        where_to_use: where it belongs, in one sentence without a full stop.
    """

    where_to_use: ClassVar[str]

    if not TYPE_CHECKING:  # to a type checker, it would mean that there is every attribute

        def __getattr__(self, name: str) -> Any:
            if name not in ("setup", "on_exception", "state_key"):  # what a Trainer asks first, and after that error
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise TypeError(f"callbacks=[{type(self).__name__}(...)]: it is not a callback. {self.where_to_use}.")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Example:
        >>> require("json", extra="plots").__name__
        'json'
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # here, for the check above comes before torch

    # At its first import a package says what it lacks; to be asked for again it takes no time in a step.
    quiet = nullcontext() if module in sys.modules else quiet_libraries()
    try:
        # Some packages make tables when they are imported, which must hold real values in a prediction too.
        with unset_fake_temporarily(), quiet:
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"{module.partition('.')[0]} is not installed: it comes with the extra '{extra}'"
        raise ModuleNotFoundError(f"{what}. pip install 'lightning-fasttrain[{extra}]'.") from error


def refuse_mixed_lightning(*objects: object) -> None:
    """Refuse objects made with ``pytorch_lightning`` beside ours, which are made with ``lightning``.

    The two packages hold the same code under two names, so ``isinstance`` fails across them and a foreign
    callback is silently taken for something it is not.

    Raises:
        TypeError: one of the ``objects`` comes from ``pytorch_lightning``.
    """
    for thing in objects:
        # A user's class comes from a module of their own; one of its bases shows which package it is made with.
        origins = [base.__module__.partition(".")[0] for base in type(thing).__mro__]
        if "pytorch_lightning" in origins:
            raise TypeError(
                f"{type(thing).__name__} comes from `pytorch_lightning`, lightning_fasttrain from `lightning`: "
                "to Python these are two unrelated packages, so hooks and isinstance checks miss each other. "
                "Import from `lightning` everywhere (`import lightning as L`)."
            )
