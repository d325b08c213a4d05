"""Record every allocation of a few training steps with its purpose, and write a timeline of their memory."""

import math
import os
import sys
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
from torch import nn
from torch._C._profiler import RecordScope
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile

from lightning_fasttrain.core.atomic_write import refuse_unwritable
from lightning_fasttrain.core.checks import NonNegativeInt, PositiveInt, check_arguments
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.host.lightning import FabricModule
from lightning_fasttrain.core.messages import explain, format_bytes, say, warn
from lightning_fasttrain.core.modules.parameters import device_of, quantized_tensors
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, patch, wrappers_on
from lightning_fasttrain.core.peak_memory import (
    COUNTED,
    event_tree,
    find_storages,
    refuse_second_profiler,
    refuse_uncounted,
    start_profile,
)
from lightning_fasttrain.profiling.memory_meter import MemoryWindow
from lightning_fasttrain.profiling.memory_record import Allocation, MemoryRecord, check_kinds, save_memory_record
from lightning_fasttrain.technique import Capability

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
        elif name and by_block:
            yield _NamedForward(module, name).install()
        elif name:
            # Below other wrappers, so that a recomputation is seen.
            yield _NamedForward(module, name).install_below()


class _NamedForward(WrappedForward):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with record_function(_MODULE + self.name):
            return self.inner(*args, **kwargs)


def _named_call(name: str, call: Callable[..., object]) -> Callable[..., Any]:
    def call_named(*args: object, **kwargs: object) -> Any:
        with record_function(_MODULE + name):
            return call(*args, **kwargs)

    return call_named


@check_arguments
class MemoryRecording:
    """Records what memory is used for in the steps of a ``with`` block: how much, when, by which module and operator.

    Every allocation is in one of six categories, which add up to the total at every time:

    - parameters, including buffers
    - gradients: ``.grad``, and gradients about to be added to it
    - optimizer state
    - activations: allocated by a forward or a recomputation, and still alive when the backward continues
    - temporaries: everything else, such as the gradients of activations
    - inputs: the batches, and memory that a ``DataLoader`` allocates in this process

    Torch's profiler records the allocations, on the CPU and on CUDA, with ranges around the forwards of the modules;
    both end with the block, and slow it down. Times are those of the host. As in
    :class:`~lightning_fasttrain.profiling.PeakMemory`, existing memory on the CPU is known only if it is passed here;
    on CUDA the rest counts as temporaries. A compiled module is reported as a unit.

    When memory runs out, the record shows when, and the error message gains the three largest holders. They are in the
    message itself rather than in a note of the traceback, as job logs often keep nothing else.

    Args:
        model: the model whose parameters, gradients and modules are named.
        optimizers: one or several, whose state is named.
        batch: the batch of the first step.
        save_to: a folder for the files of :func:`~lightning_fasttrain.profiling.save_memory_record` at the end of the
            block.
        kinds: kinds of these files.

    Attributes:
        record: a :class:`~lightning_fasttrain.profiling.MemoryRecord` once the block has ended, also when out of
            memory.

    Raises:
        ValueError: the model is neither on the CPU nor on CUDA.
        RuntimeError: at entry, if another torch profiler is active.

    Example:
        >>> net, batch = nn.Linear(256, 256, bias=False), torch.ones(4, 256)
        >>> adam = torch.optim.Adam(net.parameters())
        >>> with MemoryRecording(net, adam, batch) as recording:
        ...     net(batch).sum().backward()
        ...     adam.step()
        >>> peaks = recording.record.peaks
        >>> peaks["parameters"], peaks["gradients"], peaks["inputs"]
        (262144, 262144, 4096)

    Source:
        Ours. The categories are close to those of torch's own memory timeline, which infers them from the graph of all
        tensors; here parameters, gradients, state and inputs are identified by their addresses.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        batch: object = None,
        save_to: str | os.PathLike[str] | None = None,
        kinds: Sequence[str] = ("html", "json"),
    ) -> None:
        check_kinds(kinds)
        # Otherwise all names would begin with "module.".
        while isinstance(model, FabricModule | DistributedDataParallel):
            model = model.module
        self.device = device_of(model)
        refuse_uncounted("MemoryRecording", self.device)
        self.record: MemoryRecord | None = None
        self._model, self._batch, self._save_to, self._kinds = model, batch, save_to, kinds
        self._profile: profile | None = None
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)

    def __enter__(self) -> "MemoryRecording":
        refuse_second_profiler("MemoryRecording")
        self._notes: list[_Seen | Change] = []
        self._watches: list[weakref.finalize] = []
        self._steps_ns: list[int] = []
        with ExitStack() as undo:
            for take_away in name_forwards(self._model):
                undo.callback(take_away)
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    # The first hook sees the incoming gradient before it is added; the other one sees the sum, which
                    # may be new memory.
                    undo.callback(parameter.register_hook(partial(self._see, "gradients", name)).remove)
                    see_sum = partial(self._see_sum, name)
                    undo.callback(parameter.register_post_accumulate_grad_hook(see_sum).remove)
            on_cuda = self.device.type == "cuda"
            self._before_bytes = torch.cuda.memory_allocated(self.device) if on_cuda else None
            self._see_model(watch=True)
            # Keep no reference to memory that the block may free.
            batch, self._batch = self._batch, None
            self.next_step(batch)
            self._profile, self._entry_ns = start_profile(), time.time_ns()
            # Until here, an error undoes everything above.
            self._undo = undo.pop_all()
        return self

    def next_step(self, batch: object = None) -> None:
        """Mark the beginning of another step, and pass its batch."""
        self._steps_ns.append(time.time_ns())
        self.see_batch(batch)

    def see_batch(self, batch: object) -> None:
        """Pass one more batch of the step, if it accumulates several."""
        self._see("inputs", "batch", batch, watch=True)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        finished = self.stop()
        if error is None or is_out_of_memory(error):
            events = read_events(finished, self.device)
            self.record = self._make_record(events, out_of_memory=error is not None)
            saved = self._save(self.record)
            if error is not None:
                error.args = (f"{error}\n{_what_filled_it(self.record, events)}{saved}",)

    def stop(self) -> profile:
        """End the recording without making a record."""
        finished, self._profile = self._profile, None
        assert finished is not None
        # Gradients and state that were allocated within the block are named here, while their addresses are still
        # valid.
        self._see_model()
        self._end_ns = time.time_ns()
        self._undo.close()
        finished.stop()
        for watch in self._watches:
            watch.detach()
        return finished

    def _see_model(self, watch: bool = False) -> None:
        """Name the model's memory. Memory with two roles, such as a parameter in the batch, keeps its first name."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for parameter, name in names.items():
            self._see("parameters", name, parameter, watch)
        for name, tensor in (*self._model.named_buffers(), *quantized_tensors(self._model)):
            self._see("parameters", name, tensor, watch)
        for parameter, name in names.items():
            self._see("gradients", name, parameter.grad, watch)
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                self._see("optimizer state", names.get(parameter, "(another's)"), state, watch)

    def _see_sum(self, name: str, parameter: nn.Parameter) -> None:
        self._see("gradients", name, parameter.grad)

    def _see(self, category: str, name: str, held: object, watch: bool = False) -> None:
        now = time.time_ns()  # the clock of the profiler's events
        for storage in find_storages(held):
            if storage.device == self.device and storage.nbytes():
                address = storage.data_ptr()
                self._notes.append(_Seen(now, address, storage.nbytes(), category, name, watch))
                # On CUDA the profiler reports every free, on the CPU only those of allocations that it saw.
                if watch and self.device.type == "cpu":
                    self._watches.append(weakref.finalize(storage, self._see_end, address, storage.nbytes()))

    def _see_end(self, address: int, nbytes: int) -> None:
        self._notes.append(Change(time.time_ns(), address, -nbytes, Place()))

    def _make_record(self, events: Events, out_of_memory: bool) -> MemoryRecord:
        def ms(ns: int) -> float:
            return max(0.0, (ns - self._entry_ns) / 1e6)

        failed_ms = None
        if out_of_memory and events.failed is not None:
            failed_ms = ms(events.failed.ns)
        # Memory of a failed forward waits for a backward that never comes; in a good step all backwards are known.
        allocations = _allocations(events, self._notes, ms, self._before_bytes, inf if failed_ms is None else failed_ms)
        return MemoryRecord(str(self.device), allocations, list(map(ms, self._steps_ns)), ms(self._end_ns), failed_ms)

    def _save(self, record: MemoryRecord) -> str:
        if self._save_to is None:
            return ""
        try:
            files = save_memory_record(record, self._save_to, self._kinds)
        except OSError as error:  # training must not fail because of it
            warn(explain("the memory timeline was not saved", str(error), "Use another folder"))
            return ""
        return f"\nSee {files[0]}"


_BEFORE = "(there before)"


class _Seen(NamedTuple):
    """Memory at this address belongs to this category; watched memory may be older than the recording."""

    ns: int
    address: int
    nbytes: int
    category: str
    name: str
    watched: bool


def _track(events: list[_Seen | Change], ms: Callable[[int], float], on_cuda: bool) -> list[tuple[Allocation, str]]:
    """Follow the memory at each address in the order of time; return allocations with the phase in which each began."""
    found: list[tuple[Allocation, str]] = []
    live: dict[int, Allocation] = {}

    def take(ns: int, address: int, nbytes: int, place: Place) -> None:
        # The memory was freed in another thread, without being profiled.
        if address in live:
            live[address].end_ms = ms(ns)
        live[address] = Allocation(nbytes, ms(ns), category="", module=place.module, op=place.op)
        found.append((live[address], place.phase))

    # The sort is stable, so at equal times the allocation comes before the note that names it.
    for it in sorted(events, key=lambda it: it.ns):
        match it:
            case _Seen():
                if it.watched and it.address not in live:
                    # CUDA's allocator allocates multiples of 512 bytes.
                    take(it.ns, it.address, -(-it.nbytes // 512) * 512 if on_cuda else it.nbytes, Place())
                if it.address in live and not live[it.address].category:
                    live[it.address].category, live[it.address].name = it.category, it.name
            case Change() if it.nbytes > 0:
                take(*it)
            case Change() if it.address in live:
                live.pop(it.address).end_ms = ms(it.ns)
            case Change() if on_cuda:
                # Freed, but never recorded: it existed before, which only CUDA's profiler reports.
                found.append((Allocation(-it.nbytes, 0.0, ms(it.ns), name=_BEFORE), ""))
    return found


def _allocations(
    events: Events, notes: list[_Seen | Change], ms: Callable[[int], float], before_bytes: int | None, failed_ms: float
) -> list[Allocation]:
    """Return all allocations with their categories; ``before_bytes`` were in use at entry, known only on CUDA."""
    backward_ms = [*map(ms, events.backward_ns), failed_ms]
    allocations: list[Allocation] = []
    for allocation, phase in _track([*events.changes, *notes], ms, on_cuda=before_bytes is not None):
        if not allocation.category:
            allocation.category = _category(allocation, phase, backward_ms)
        allocations.append(allocation)
    rest = (before_bytes or 0) - sum(a.nbytes for a in allocations if a.begin_ms == 0)
    if rest > 0:
        allocations.append(Allocation(rest, 0.0, name=_BEFORE))
    return sorted(allocations, key=lambda a: a.begin_ms)


def _category(allocation: Allocation, phase: str, backward_ms: list[float]) -> str:
    if phase == "loader":
        return "inputs"
    if phase in ("forward", "recomputation"):
        following = bisect_right(backward_ms, allocation.begin_ms)
        if following < len(backward_ms) and backward_ms[following] < allocation.end_ms:
            return "activations"
    return "temporaries"


def _what_filled_it(record: MemoryRecord, events: Events) -> str:
    place = events.failed.place if events.failed is not None else Place()
    holders = record.holders(ms=record.failed_ms)
    held = sum(holder.nbytes for holder in holders)
    where = f" of {place.module}" if place.module else ""
    largest = ", ".join(map(str, holders[:3]))
    return f"Out of memory in {place.op or 'Python'}{where}, with {format_bytes(held)} in use. Largest: {largest}."


class MemoryTimeline(MemoryWindow):
    """Records a few steps, and writes what their memory was used for; see :class:`MemoryRecording`.

    Acts between ``on_train_batch_start`` of the first recorded step and ``on_train_batch_end`` of the last; before
    and after, nothing is attached and there is no cost. The steps are consecutive: validation after a step ends the
    recording, and validation during a step restarts it. With several processes each writes to its own folder,
    ``rank0`` and so on. If memory runs out in a recorded step, the files are written and the error names the largest
    holders.

    Args:
        folder: folder of the files, ``memory_timeline.html`` and so on.
        first_step: number of steps before the recording, which create optimizer state and compiled code. On the CPU,
            torch's only profiler is shared with ``MemoryMeter``, which by default is done by then.
        steps: number of steps to record.
        kinds: kinds of files, as in :func:`~lightning_fasttrain.profiling.save_memory_record`.

    Attributes:
        record: a :class:`~lightning_fasttrain.profiling.MemoryRecord`; None until the recording has ended.

    Raises:
        TypeError, ValueError: ``first_step`` is not an integer of at least 0, ``steps`` is not an integer of at least
            1, or a kind is unknown.
        OSError: in ``fit``, before the first step: no file can be created in ``folder``.
        ModuleNotFoundError: "png" without matplotlib.

    Example:
        >>> timeline = MemoryTimeline("memory", first_step=10, steps=1)
        >>> timeline.record  # after `Trainer(callbacks=[timeline]).fit(model)`: print it for a table

    Source:
        See :class:`~lightning_fasttrain.profiling.MemoryRecording`.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.ACTS_IN_BACKWARD})
    effect: ClassVar[str] = "a picture of memory over time by category, with the op and module at the peak"
    when: ClassVar[str] = "you want to know what memory is used for, and when"
    in_a_loop: ClassVar[str] = "profiling.MemoryRecording(model, optimizer, batch)"
    profiled: ClassVar[tuple[str, ...]] = COUNTED

    def __init__(
        self,
        folder: str | os.PathLike[str],
        first_step: NonNegativeInt = 3,
        steps: PositiveInt = 2,
        kinds: Sequence[str] = ("html", "json"),
    ) -> None:
        check_kinds(kinds)
        self.folder, self.kinds = Path(folder), tuple(kinds)
        self.first_step = first_step
        self.steps = steps
        self.record: MemoryRecord | None = None
        self._open: MemoryRecording | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: nothing of this run has been recorded."""
        refuse_unwritable(self.folder, f"MemoryTimeline(folder={str(self.folder)!r})")
        self.record, self._whole_steps = None, 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is on the device, and the forward comes next."""
        if self._open is not None and self._in_step:
            self._open.see_batch(batch)
        elif self._open is not None:
            self._open.next_step(batch)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _open_window(self, trainer: L.Trainer, module: L.LightningModule, batch: object) -> None:
        folder = self.folder if trainer.world_size == 1 else self.folder / f"rank{trainer.global_rank}"
        recording = MemoryRecording(module, trainer.optimizers, batch, save_to=folder, kinds=self.kinds)
        self._open = recording.__enter__()

    def _end_step(self, trainer: L.Trainer) -> None:
        if self._open is not None:
            self._whole_steps += 1
            if self._whole_steps == self.steps:
                self._finish()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: validation does not belong to a step."""
        if self._whole_steps and not self._in_step:
            self._finish()
        else:
            self._discard()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: finish with the steps recorded so far, or report that there were none."""
        self.on_validation_start(trainer, pl_module)
        if self.record is None and self._due < math.inf:
            say("MemoryTimeline: nothing was recorded: no complete step came after the first %d", self.first_step)

    def _finish(self, error: BaseException | None = None) -> None:
        """End the recording, if there is one, and keep its record; with an error only if memory ran out."""
        recording, self._open = self._open, None
        if recording is None:
            return
        recording.__exit__(None, error, None)
        self.record = record = recording.record
        if error is None and record is not None:
            self._due = math.inf
            say("MemoryTimeline: peak %s %s; see %s", format_bytes(record.peak_bytes), record.where, self.folder)

    def _discard(self) -> None:
        recording, self._open = self._open, None
        if recording is not None:
            recording.stop()
            self._whole_steps = 0

    def _leave(self) -> None:
        # Lightning undoes a failed run while it handles the error.
        error = sys.exception()
        if error is None:
            self._discard()
        else:
            self._finish(error)
