"""What a step function is made of: its loss, the models that it uses, and whether it is the one of last time."""

import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain.core.messages import explain

_LIBRARIES = ("torch.", "lightning.")  # they do the same in every run


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returned: a tensor, or a mapping or object with a ``loss``.

    Raises:
        TypeError: there is none.
        ValueError: it is not one number.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        why = "micro-batches are summed by their mean loss, and there is no loss tensor in it"
        way_out = "Return the loss, or a dict with a 'loss'"
        raise TypeError(explain(f"the step returned {type(output).__name__}", why, way_out))
    if loss.numel() != 1:
        why = "micro-batches are weighed by their mean loss, which is one number"
        raise ValueError(explain(f"the step returned a loss of shape {tuple(loss.shape)}", why, "Return loss.mean()"))
    return loss.reshape(())


def models_of(step: object) -> list[nn.Module]:
    """The modules that a step function reaches directly: itself, what it is bound to, closes over, or names.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> models_of(lambda batch: net(batch)) == [net]
        True
    """
    return [thing for thing in _reach(step) if isinstance(thing, nn.Module)]


def key_of(*functions: object) -> tuple[Any, ...]:
    """Equal for functions that do the same: the same code with the same models and helpers.

    A function that is made again in every turn of a loop is a new object each time, but its code is not. The key holds
    nothing alive.
    """
    things = [thing for function in functions for thing in _reach(function)]
    return tuple(_reference(thing) for thing in things)


def _reference(thing: object) -> object:
    if isinstance(thing, types.FunctionType):
        return weakref.ref(thing.__code__)
    if type(thing).__module__.startswith(_LIBRARIES) and not isinstance(thing, nn.Module):
        return type(thing)  # such as the autocast that a step is decorated with in every turn
    try:
        # Not an id, which a later object may have: a dead reference is equal to no other.
        return weakref.ref(thing)
    except TypeError:  # a string, say
        return thing


def _reach(thing: object, depth: int = 3) -> Iterator[object]:
    """The functions and models that ``thing`` works with, itself first."""
    if isinstance(thing, functools.partial):
        yield from _reach_each(thing.func, *thing.args, *thing.keywords.values(), depth=depth)
    elif isinstance(thing, types.MethodType):
        yield from _reach_each(thing.__func__, thing.__self__, depth=depth)
    else:
        yield thing
    if isinstance(thing, types.FunctionType) and depth > 0 and not thing.__module__.startswith(_LIBRARIES):
        closed_over = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        named = [thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__]
        yield from _reach_each(*closed_over, *named, *(thing.__defaults__ or ()), depth=depth)


def _reach_each(*things: object, depth: int) -> Iterator[object]:
    for thing in things:
        if callable(thing) and not isinstance(thing, type):
            yield from _reach(thing, depth - 1)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False
