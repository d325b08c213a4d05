"""Events of torch's profiler: every change of memory, with the phase, module and operator that caused it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch._C._profiler import RecordScope
from torch.autograd.profiler import record_function
from torch.profiler import profile

from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, patch, put_on, wrappers_on
from lightning_fasttrain.core.peak_memory import event_tree

_MODULE = "lightning_fasttrain module "  # prefix of a module's range
_NODE = "autograd::engine::evaluate_function: "  # torch's own prefix
_OPTIMIZER, _LOADER = "Optimizer.", "enumerate(DataLoader)"


class Place(NamedTuple):
    """The place of an event.

    Attributes:
        phase: "backward", "recomputation" within one, "optimizer", "loader", or "forward", which is everything else.
        module: qualified name of the innermost module; of the optimizer's ``step``; or empty.
        op: the operator that the module called, or the node of the backward; or empty.
    """

    phase: str = "forward"
    module: str = ""
    op: str = ""


class Change(NamedTuple):
    """Memory allocated, or freed where ``nbytes`` is negative."""

    ns: int
    address: int
    nbytes: int
    place: Place


@dataclass
class Events:
    """Changes of memory, the times of backward nodes, and where memory last ran out."""

    changes: list[Change] = field(default_factory=list)
    backward_ns: list[int] = field(default_factory=list)
    failed: Change | None = None


def read_events(finished: profile, device: torch.device) -> Events:
    """Read the profiler's events in the order of time, so that a forward comes before its backward.

    A node of the backward has the sequence number of its forward operator, which ran in a module.
    """
    events, module_of = Events(), dict[int, str]()
    roots = sorted(event_tree(finished), key=lambda event: event.start_time_ns)
    # Reversed, since the last item of a stack comes first.
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
    events.backward_ns.sort()  # each device has its own backward thread
    return events


def _find_place(event: object, place: Place, module_of: dict[int, str]) -> Place:
    name, (_, details) = event.name, event.typed
    if name.startswith(_NODE):
        return Place("backward", module_of.get(details.sequence_number, ""), name.removeprefix(_NODE))
    if name.startswith(_MODULE):
        return Place(_phase_of_a_forward(place.phase), name.removeprefix(_MODULE))
    if name.startswith(_OPTIMIZER):
        return Place("optimizer", name.partition("#")[2])
    if name.startswith(_LOADER):
        return Place("loader")
    # Any other scope is a range that is named by other code, not an operator.
    if getattr(details, "scope", None) != RecordScope.FUNCTION:
        return place
    # Gradients are off: in the backward, or in the optimizer.
    if details.sequence_number < 0:
        return place._replace(op=place.op or name)
    phase = _phase_of_a_forward(place.phase)
    if phase != place.phase:
        place = Place(phase, place.module if phase == "recomputation" else "")
    if phase == "forward":
        # Of several operators with one number, the last one made the node.
        module_of[details.sequence_number] = place.module
    else:
        module_of.setdefault(details.sequence_number, place.module)
    return place._replace(op=place.op or name)


def _phase_of_a_forward(phase: str) -> str:
    """Return the phase of a forward called during ``phase``; an optimizer's closure may contain the whole step."""
    return {"backward": "recomputation", "optimizer": "forward"}.get(phase, phase)


def name_forwards(model: nn.Module) -> Iterator[Undo]:
    """Add a named profiler range around the forward of each module; yield how to remove each.

    Modules inside a compiled module are skipped, because the compiler would notice the change and recompile.
    """
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(map(name.startswith, compiled)) or isinstance(module, torch.jit.ScriptModule):
            continue
        call = module._compiled_call_impl
        by_block = any(wrapper.is_compiled for wrapper in wrappers_on(module, WrappedForward))
        if call is not None or by_block or isinstance(module, torch._dynamo.OptimizedModule):
            compiled.append(f"{name}.".removeprefix("."))  # "" is the model, which holds all others
        if call is not None:
            # A module compiled with `compile()` is called through this attribute.
            yield patch(module, "_compiled_call_impl", _named_call(name, call))
        elif name:
            yield _NamedForward(module, name).install()


class _NamedForward(WrappedForward):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name

    def install(self) -> Undo:
        """Install beneath existing wrappers, so that recomputation is seen, but not inside compiled code."""
        undo, top = super().install(), self.previous
        if _may_be_above(top):
            bottom = top
            while _may_be_above(bottom.previous):
                bottom = bottom.previous
            self.previous, bottom.previous = bottom.previous, self
            put_on(self.module, top)
        return undo

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with record_function(_MODULE + self.name):
            return self.inner(*args, **kwargs)


def _may_be_above(wrapper: object) -> TypeGuard[WrappedForward]:
    return isinstance(wrapper, WrappedForward) and not wrapper.is_compiled


def _named_call(name: str, call: Callable[..., object]) -> Callable[..., Any]:
    def call_named(*args: object, **kwargs: object) -> Any:
        with record_function(_MODULE + name):
            return call(*args, **kwargs)

    return call_named
