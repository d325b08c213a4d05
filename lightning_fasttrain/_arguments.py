"""Floor: what a technique was made with, so that it can say so, and names that others have for our arguments."""

import functools
import inspect
from typing import Any

from torch import nn

from lightning_fasttrain._messages import explain


def remember_arguments(cls: Any) -> None:
    """Let ``cls`` keep what it is made with, and answer an argument of ``cls.names_elsewhere`` with our name for it."""
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() & self.names_elsewhere.keys():
            what, way_out = f"{type(self).__name__}({name}=...)", f"Use {self.names_elsewhere[name]}="
            raise TypeError(explain(what, "that is another library's name for it", way_out))
        if "_made_with" not in vars(self):  # by the class that was called, before those it is made of
            self._made_with = (args, kwargs)
        make(self, *args, **kwargs)

    cls.__init__ = __init__


def describe(made: Any) -> str:
    """The call that made it: defaults left out, modules by their class.

    Example:
        >>> from lightning_fasttrain.data import MicroBatching
        >>> describe(MicroBatching(4, count="samples"))
        "MicroBatching(n=4, count='samples')"
    """
    args, kwargs = getattr(made, "_made_with", ((), {}))
    given = inspect.signature(type(made)).bind_partial(*args, **kwargs).arguments
    words = []
    for name, value in given.items():
        words.append(f"{name}={type(value).__name__ if isinstance(value, nn.Module) else repr(value)}")
    return f"{type(made).__name__}({', '.join(words)})"
