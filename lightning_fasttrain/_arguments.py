"""Floor: what a technique was made with, so that it can say so, and names that others have for our arguments."""

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain._messages import explain


def remember_arguments(cls: Any) -> None:
    """Let ``cls`` keep in words how it was made, and answer other libraries' names for its arguments with ours.

    In words, since a reference to a teacher, say, would be copied with the technique.
    """
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() & self.names_elsewhere.keys():
            what, way_out = f"{type(self).__name__}({name}=...)", f"Use {self.names_elsewhere[name]}="
            raise TypeError(explain(what, "that is another library's name for it", way_out))
        if type(self).__init__ is __init__:  # not called by a subclass, which says it itself
            self._made_with = _describe_arguments(make, self, *args, **kwargs)
        make(self, *args, **kwargs)

    cls.__init__ = __init__


def describe(made: object) -> str:
    """The call that made it: defaults left out, modules and tensors by their class.

    Example:
        >>> from lightning_fasttrain.data import MicroBatching
        >>> describe(MicroBatching(4, count="samples"))
        "MicroBatching(n=4, count='samples')"
    """
    return f"{type(made).__name__}({getattr(made, '_made_with', '')})"


def _describe_arguments(make: Any, *args: Any, **kwargs: Any) -> str:
    given = inspect.signature(make).bind(*args, **kwargs).arguments  # a wrong one ends here, as in the call itself
    words = []
    for name, value in list(given.items())[1:]:  # the first is self
        words.append(f"{name}={type(value).__name__ if isinstance(value, nn.Module | Tensor) else repr(value)}")
    return ", ".join(words)
