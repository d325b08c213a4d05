"""What torch's profiler saw: every change of memory, in which phase, and with which module and operator at work."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch._C._profiler import RecordScope
from torch.autograd.profiler import record_function
from torch.profiler import profile

from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, patch, wrappers_on

_MODULE = "lightning_fasttrain module "  # before the name of a module, in the name of its range
_NODE = "autograd::engine::evaluate_function: "  # the other names are torch's own
_OPTIMIZER, _LOADER = "Optimizer.", "enumerate(DataLoader)"


class Place(NamedTuple):
    """Where something happened.

    Attributes:
        phase: "backward", "recomputation" within one, "optimizer", "loader", or "forward", which is all else.
        module: qualified name of the innermost module; of the optimizer's ``step``; or empty.
        op: the operator that the module called, or the node of the backward pass; or empty.
    """

    phase: str = "forward"
    module: str = ""
    op: str = ""


class Change(NamedTuple):
    """Memory taken, or given back where ``nbytes`` is negative."""

    ns: int
    address: int
    nbytes: int
    place: Place


@dataclass
class Events:
    """What was read: the changes, the moments at which a backward went on, and where memory last ran out."""

    changes: list[Change] = field(default_factory=list)
    backward_ns: list[int] = field(default_factory=list)
    failed: Change | None = None


def read_events(finished: profile, device: torch.device) -> Events:
    """Walk through the profiler's events in the order of time, so that a forward comes before its backward.

    A node of the backward pass has the sequence number of the operator that it was made for, and that ran in a module.
    """
    assert finished.profiler is not None
    assert finished.profiler.kineto_results is not None
    events, module_of = Events(), dict[int, str]()
    roots = sorted(finished.profiler.kineto_results.experimental_event_tree(), key=lambda event: event.start_time_ns)
    # Reversed, since the last of a stack comes first.
    stack: list[tuple[Any, Place]] = [(event, Place()) for event in reversed(roots)]
    while stack:
        event, place = stack.pop()
        name, ns = event.name, event.start_time_ns
        if name == "[memory]":
            what = event.typed[1]
            if what.device.type == device.type and (device.type == "cpu" or what.device.index == device.index):
                events.changes.append(Change(ns, what.ptr, what.alloc_size, place))
        elif name == "[OutOfMemory]":
            events.failed = Change(ns, 0, 0, place)
        else:
            place = _find_place(event, place, module_of)
            if place.phase == "backward":
                events.backward_ns.append(ns)
            stack.extend((child, place) for child in reversed(event.children))
    events.backward_ns.sort()  # devices have threads of their own for it
    return events


def _find_place(event: Any, place: Place, module_of: dict[int, str]) -> Place:
    name, (_, details) = event.name, event.typed
    if name.startswith(_NODE):
        return Place("backward", module_of.get(details.sequence_number, ""), name.removeprefix(_NODE))
    if name.startswith(_MODULE):
        return Place(_phase_of_a_forward(place.phase), name.removeprefix(_MODULE))
    if name.startswith(_OPTIMIZER):
        return Place("optimizer", name.partition("#")[2])
    if name.startswith(_LOADER):
        return Place("loader")
    if getattr(details, "scope", None) != RecordScope.FUNCTION:  # no operator: a range that someone else has named
        return place
    if details.sequence_number < 0:  # gradients are off: the backward itself, or the optimizer's arithmetic
        return place._replace(op=place.op or name)
    phase = _phase_of_a_forward(place.phase)
    if phase != place.phase:
        place = Place(phase, place.module if phase == "recomputation" else "")
    if phase == "forward":
        module_of[details.sequence_number] = place.module  # of several operators with one number the last made the node
    else:
        module_of.setdefault(details.sequence_number, place.module)
    return place._replace(op=place.op or name)


def _phase_of_a_forward(phase: str) -> str:
    """Of one that is called amid ``phase``; an optimizer may be given the whole step as a closure."""
    return {"backward": "recomputation", "optimizer": "forward"}.get(phase, phase)


def name_forwards(model: nn.Module) -> Iterator[Undo]:
    """Put a range of the profiler with its name around the forward of each module; yields how to take each away.

    What lies in a compiled module is left alone, because the compiler would notice and begin again.
    """
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in compiled) or isinstance(module, torch.jit.ScriptModule):
            continue
        call = module._compiled_call_impl
        by_block = any(wrapper.is_compiled for wrapper in wrappers_on(module, WrappedForward))
        if call is not None or by_block or isinstance(module, torch._dynamo.OptimizedModule):
            compiled.append(f"{name}." if name else "")
        if call is not None:
            # A module that was compiled with `compile()` is called through this.
            yield patch(module, "_compiled_call_impl", _named_call(name, call))
        elif name:
            yield _NamedForward(module, name).install()


class _NamedForward(WrappedForward):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name

    def install(self) -> Undo:
        """Beneath what stands there already, so that a recomputation comes by; but not in what is compiled."""
        undo, top = super().install(), self.previous
        if _may_be_above(top):
            bottom = top
            while _may_be_above(bottom.previous):
                bottom = bottom.previous
            self.module.forward, self.previous, bottom.previous = top, bottom.previous, self
        return undo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with record_function(_MODULE + self.name):
            return self.inner(*args, **kwargs)


def _may_be_above(wrapper: object) -> TypeGuard[WrappedForward]:
    return isinstance(wrapper, WrappedForward) and not wrapper.is_compiled


def _named_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def call_named(*args: Any, **kwargs: Any) -> Any:
        with record_function(_MODULE + name):
            return call(*args, **kwargs)

    return call_named
