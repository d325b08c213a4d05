"""Find the attributes of a module that its forward changes, and set them for a while as they were before it."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from dis import get_instructions
from functools import cache
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.step_state import StepState

_CONTAINERS = (list, dict, set, deque)
_WATCHED = 64  # forwards after one that wrote to parameters, which a trial may have undone
_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module()))  # hooks and the like, and what is in other dicts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _Earlier(NamedTuple):
    """An attribute as it was before a forward."""

    own: dict[str, Any]  # the attributes of its module
    name: str
    value: Any
    is_deep: bool = False  # whether what lies inside has changed, so that it is copied as a whole


class ForwardAttributes:
    """The attributes that a module's forward changes, such as a temperature that falls, or a generator of its own.

    Attributes that are set, and containers, are compared at each forward where some code of the module could set one.
    What lies deeper, such as a number in a dataclass, is looked at in the forwards 1, 2, 4, 8, and so on, and copied at
    each forward if it changes.

    Args:
        module: the module, whose submodules count too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.watched = 1  # number of coming forwards that may write to parameters, as the first
        self.inside: list[tuple[nn.Module, str]] = []  # attributes that change inside
        self._forwards = 0
        # Watched only where some code could set them, since that takes time at each forward.
        self.of_modules = list(map(_Attributes, module.modules()))
        if not any(_sets_attributes(kind) for one in module.modules() for kind in type(one).__mro__):
            self.of_modules = [one for one in self.of_modules if one.containers]

    @property
    def may_write_parameters(self) -> bool:
        """Whether the next forward may write to parameters, as one that initializes them."""
        return bool(self.of_modules and self.watched)

    def contexts(self, keeping: AbstractContextManager[object], reusing: AbstractContextManager[object]) -> Contexts:
        """Return the contexts of forward and recomputation, in which attributes that the forward changes are as before.

        Where a forward, such as the first, also writes to parameters, which are not restored, attributes stay as it has
        set them.

        Args:
            keeping, reusing: further contexts, entered inside.
        """
        self._forwards += 1
        is_examined = not self._forwards & (self._forwards - 1)
        if not (self.of_modules or self.inside or is_examined):
            return keeping, reusing
        changed: list[_Earlier] = []

        @contextmanager
        def forward() -> Iterator[None]:
            # Modes around the block, such as one that counts what it saves, must not see what is read here.
            with _disable_current_modes():
                before = _BeforeForward(self, is_examined)
            with keeping:
                yield
            with _disable_current_modes():
                changed.extend(before.list_changed())

        @contextmanager
        def recompute() -> Iterator[None]:
            now = [(own, name, own.get(name, _MISSING)) for own, name, *_ in changed]
            with _disable_current_modes():
                for own, name, value, is_deep in changed:
                    # Copied again, since a graph may be walked twice.
                    _set_attribute(own, name, self.copy(value, name) if is_deep else _copy_container(value))
            try:
                with reusing:
                    yield
            finally:
                for own, name, value in now:
                    _set_attribute(own, name, value)

        return forward(), Again(recompute)

    def copy_inside(self) -> list[_Earlier]:
        """Return copies of the attributes that change inside."""
        found: list[_Earlier] = []
        for module, name in self.inside:
            own = vars(module)
            if name in own:
                found.append(_Earlier(own, name, self.copy(own[name], name), is_deep=True))
        return found

    def copy(self, value: Any, name: str) -> Any:
        """Copy an object; modules, parameters and buffers in it are the same.

        Raises: ValueError: it cannot be copied.
        """
        shared = (*self.module.modules(), *self.module.parameters(), *self.module.buffers())
        try:
            return deepcopy(value, {id(each): each for each in shared})
        except (RuntimeError, TypeError, NotImplementedError) as error:
            what = f"{type(self.module).__name__}, which is recomputed in the backward, changes its attribute '{name}'"
            way_out = "Keep such state in numbers, tensors and containers of them, or leave this block out"
            raise ValueError(explain(what, f"it cannot be copied for the second forward ({error})", way_out)) from error


class _BeforeForward:
    """The attributes of a module before a forward.

    Args:
        attributes: those of the module; updated by what the forward shows.
        is_examined: whether what lies inside of them is examined.
    """

    def __init__(self, attributes: ForwardAttributes, is_examined: bool) -> None:
        self.attributes, self.module = attributes, attributes.module
        self.read = [one.read() for one in attributes.of_modules]
        self.hooks = _count_hooks(attributes.of_modules)
        self.parameters = list(self.module.parameters()) if attributes.may_write_parameters else []
        self.norms = list(map(_norm_of, self.parameters))
        self.inside = attributes.copy_inside()
        self.state: StepState | None = None
        self.held: dict[nn.Module, dict[str, Any]] = {}
        if is_examined:
            self.state = StepState([self.module], parameters=False, buffers=False)
            self.held = {module: dict(vars(module)) for module in self.module.modules()}

    def list_changed(self) -> list[_Earlier]:
        """Return the attributes that the forward has changed, as they were."""
        attributes = self.attributes
        # Done once, as hooks are installed by models of transformers, and so is the flag that says so.
        has_written = list(map(_norm_of, self.parameters)) != self.norms
        attributes.watched = _WATCHED if has_written else max(0, attributes.watched - 1)
        if has_written or _count_hooks(attributes.of_modules) != self.hooks:
            return []
        changed: list[_Earlier] = []
        for one, (values, copies) in zip(attributes.of_modules, self.read, strict=True):
            for name, value in one.list_changed(values, copies):
                changed.append(_Earlier(vars(one.module), name, value))
        if self.state is not None:
            self.inside = self._examine(self.state, changed)
        return [*changed, *self.inside]

    def _examine(self, state: StepState, changed: Sequence[_Earlier]) -> list[_Earlier]:
        """Find which other attributes change inside, and return them as they were."""
        self.attributes.inside = self._find_inside(state.changed(), {(id(one.own), one.name) for one in changed})
        if not self.attributes.inside:
            return []
        now = StepState([self.module], parameters=False, buffers=False)
        state.restore_values()
        try:
            return self.attributes.copy_inside()
        finally:
            now.restore_values()

    def _find_inside(self, names: Sequence[str], known: Collection[tuple[int, str]]) -> list[tuple[nn.Module, str]]:
        """Return the attributes that are the same objects as before, and differ under one of these names."""
        inside: list[tuple[nn.Module, str]] = []
        for path, module in self.module.named_modules() if names else ():
            own, prefix = vars(module), f"{path}." if path else ""
            for name, value in self.held[module].items():
                if name in _OF_MODULES or own.get(name, _MISSING) is not value or (id(own), name) in known:
                    continue
                whole = f"{prefix}{name}"
                if any(each == whole or each.startswith((f"{whole}.", f"{whole}[")) for each in names):
                    inside.append((module, name))
        return inside


class _Attributes:
    """The attributes of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.containers = self._find_containers()

    def _find_containers(self) -> list[str]:
        """Return the names of those that can be changed in place."""
        held = vars(self.module)
        return [name for name in held.keys() - _OF_MODULES if type(held[name]) in _CONTAINERS]

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes, and copies of the containers among them."""
        values = dict(vars(self.module))
        return values, {name: copy(values[name]) for name in self.containers if name in values}

    def list_changed(self, values: dict[str, Any], copies: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return name and earlier value of what differs from what :meth:`read` returned."""
        held = vars(self.module)
        written = [name for name in copies if not _hold_the_same(values[name], copies[name])]
        # Compared all at once, since this is done at each forward.
        if not written and list(map(id, held.values())) == list(map(id, values.values())):
            return []
        self.containers = self._find_containers()
        names = (values.keys() | held.keys()) - _OF_MODULES
        written += [name for name in names if held.get(name, _MISSING) is not values.get(name, _MISSING)]
        return [(name, copies.get(name, values.get(name, _MISSING))) for name in dict.fromkeys(written)]


_MAKING = ("__init__", "__init_subclass__", "__setstate__")


@cache
def _sets_attributes(kind: type) -> bool:
    """Whether a method of a class, other than those that make one, sets attributes of anything."""
    if kind.__module__.startswith("torch.nn.modules."):
        return False
    functions = [getattr(value, "__wrapped__", value) for name, value in vars(kind).items() if name not in _MAKING]
    return any(_stores(function.__code__) for function in functions if isinstance(function, FunctionType))


def _stores(code: CodeType) -> bool:
    if "setattr" in code.co_names:
        return True
    if any(one.opname in ("STORE_ATTR", "DELETE_ATTR") for one in get_instructions(code)):
        return True
    return any(map(_stores, (inner for inner in code.co_consts if isinstance(inner, CodeType))))


def _norm_of(parameter: Tensor) -> float | None:
    """Return a norm that tells whether a parameter has changed; None where it has no values here."""
    hidden = parameter.is_meta or not parameter.is_floating_point() or is_traceable_wrapper_subclass(parameter)
    if hidden or detect_fake_mode([parameter]) is not None:
        return None
    return float(torch.linalg.vector_norm(parameter.detach()))


def _count_hooks(attributes: Sequence[_Attributes]) -> int:
    return sum(len(one.module._forward_hooks) + len(one.module._forward_pre_hooks) for one in attributes)


def _hold_the_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(map(is_, one.values(), other.values()))
    return len(one) == len(other) and (one == other if isinstance(one, set) else all(map(is_, one, other)))


def _copy_container(value: Any) -> Any:
    return copy(value) if type(value) in _CONTAINERS else value


def _set_attribute(held: dict[str, Any], name: str, value: object) -> None:
    if value is _MISSING:
        held.pop(name, None)
    else:
        held[name] = value


class Again(AbstractContextManager[None]):
    """A context that can be entered again, as by a second backward through the same graph: ``make`` makes a new one."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.context = self.make()
        self.context.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self.context.__exit__(*exception)
