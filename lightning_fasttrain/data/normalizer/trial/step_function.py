"""Inspect a step function: its loss, the models that it uses, and whether it is the previous one again."""

import functools
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain.core.batch import loss_in
from lightning_fasttrain.core.messages import explain

_LIBRARIES = ("torch.", "lightning.")  # their functions are the same in every run


def loss_of(output: object) -> Tensor:
    """Return the loss in a step's output: a tensor, or the ``loss`` of a mapping or object.

    Raises:
        TypeError: there is no loss tensor.
        ValueError: the loss is not a scalar.
    """
    loss = loss_in(output, "micro-batches are summed by their mean loss, and the output holds no loss tensor")
    if loss.numel() != 1:
        why = "micro-batches are weighted by their mean loss, which must be a scalar"
        raise ValueError(explain(f"the step returned a loss of shape {tuple(loss.shape)}", why, "Return loss.mean()"))
    return loss.reshape(())


def models_of(step: object) -> list[nn.Module]:
    """Return the modules that a step function reaches directly: itself, its bound object, closure variables and
    globals, and attributes of these.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> models_of(lambda batch: net(batch)) == [net]
        True
        >>> class Runner:
        ...     def __init__(self):
        ...         self.inner = net
        ...     def step(self, batch):
        ...         return self.inner(batch)
        >>> models_of(Runner().step) == [net]
        True
    """
    return [thing for thing in _reach(step) if isinstance(thing, nn.Module)]


def key_of(*functions: object) -> tuple[Any, ...]:
    """Return a key that is equal for functions that do the same: the same code with the same models and helpers.

    A function defined inside a loop is a new object in each iteration, but its code is the same. The key keeps no
    object alive.
    """
    return tuple(map(_reference, itertools.chain.from_iterable(map(_reach, functions))))


def _reference(thing: object) -> object:
    if isinstance(thing, types.FunctionType):
        return weakref.ref(thing.__code__)
    if type(thing).__module__.startswith(_LIBRARIES) and not isinstance(thing, nn.Module):
        return type(thing)  # such as the autocast that decorates a step in every iteration
    try:
        # Not an id, which a later object may reuse: a dead reference equals no other.
        return weakref.ref(thing)
    except TypeError:  # a string, say
        return thing


def _reach(thing: object, depth: int = 3) -> Iterator[object]:
    """Yield the functions and models that ``thing`` uses, itself first."""
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
        elif not isinstance(thing, type | types.ModuleType):
            # A training program's own object, such as a runner with its model.
            for value in getattr(thing, "__dict__", {}).values():
                if isinstance(value, nn.Module):
                    yield value


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable without a value so far
        return False
