"""Check the arguments of a technique and remember them for its repr."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import lightning as L
from torch import Tensor, nn

from lightning_fasttrain.core.checks import bind_arguments
from lightning_fasttrain.core.messages import explain


def remember_arguments(cls: Any) -> None:
    """Let ``cls`` check its arguments against their annotations, and remember them as text.

    As text, since a reference to a teacher, say, would be copied with the technique.
    """
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = bind_arguments(make, type(self).__name__, cls.ways_out, self, *args, **kwargs)
        # A subclass that calls this __init__ has remembered its own arguments.
        if type(self).__init__ is __init__:
            self._given, self._settings = _describe_arguments(bound)
        make(self, *args, **kwargs)

    cls.__init__ = __init__


def describe(made: object) -> str:
    """Return the call that made an object: without defaults, with modules and tensors by their class.

    Example:
        >>> from lightning_fasttrain.data import MicroBatching
        >>> describe(MicroBatching(4, count="samples"))
        "MicroBatching(n=4, count='samples')"
    """
    settings = getattr(made, "_settings", {})
    given = ", ".join(f"{name}={settings[name]}" for name in getattr(made, "_given", ()))
    return f"{type(made).__name__}({given})"


def settings_of(made: object) -> dict[str, str]:
    """Return each argument, defaults included, as text that is the same in every process.

    Example:
        >>> from lightning_fasttrain.data import TokenWeightedAccumulation
        >>> settings_of(TokenWeightedAccumulation(4))
        {'factor': '4', 'by': "'epoch'", 'count': "'auto'", 'check': 'True'}
    """
    return {name: _ADDRESS.sub("", words) for name, words in getattr(made, "_settings", {}).items()}


_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of a function, or of an object of a class that says nothing of itself


def _describe_arguments(bound: inspect.BoundArguments) -> tuple[tuple[str, ...], dict[str, str]]:
    given = tuple(bound.arguments)[1:]  # the first is self
    bound.apply_defaults()
    return given, {name: _in_words(value) for name, value in list(bound.arguments.items())[1:]}


def _in_words(value: object) -> str:
    if isinstance(value, nn.Module | Tensor):
        return type(value).__name__
    # Sorted, so that the words are the same in each process.
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    # A YAML file may turn 32 into 32.0, which is the same setting.
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    return repr(value)


def needs_an_object(hook: _Hook) -> _Hook:
    """Make a hook refuse to be called on the class, as Lightning does if a list of callbacks holds a class."""

    @functools.wraps(hook)
    def called(self: object, *args: object, **kwargs: object) -> Any:
        if isinstance(self, L.Trainer):
            names = [callback.__name__ for callback in self.callbacks if isinstance(callback, type)]
            way_out = f"Use {', '.join(f'{name}(...)' for name in names)}"
            raise TypeError(explain(f"callbacks=[{', '.join(names)}]", "expected objects, got classes", way_out))
        return hook(self, *args, **kwargs)

    return cast(_Hook, called)
