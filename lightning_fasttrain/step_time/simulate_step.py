"""Simulate the streams of a step: the host starts kernels and collectives, which wait for what they depend on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy

from lightning_fasttrain.memory.memory_report import Moment
from lightning_fasttrain.step_time.machine import TF32, Machine, collective_seconds
from lightning_fasttrain.step_time.record_step import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ELEMENTWISE,
    GATHERS,
    PRODUCT,
    RANDOM,
    REDUCTIONS,
    TRANSCENDENTAL,
    Collective,
    Event,
    Kernel,
    RecordedStep,
)

KINDS: tuple[str, ...] = (
    "products",
    "attention",
    "element-wise",
    "optimizer",
    "exposed communication",
    "launches",
    "waiting",
)
"""Kinds of time, which add up to that of the step."""
_COMPUTED = KINDS[:4]
_EXPOSED, _LAUNCHES, _WAITING = KINDS[4:]
MOST_LAID_OUT = 3  # micro-batches; further ones take as long as the last of them
# Which take the host as long as to enter a compiled graph, with its guards and wrappers: of GPT-2 on an H200.
_GRAPH_LAUNCHES = 14
# What decides at which size kernels reach half of their rate; those that are bound by memory have no size.
_HALVES = {
    PRODUCT: "product_half_size",
    ATTENTION: "attention_half_length",
    ATTENTION_BACKWARD: "attention_backward_half_length",
    ELEMENTWISE: "product_half_size",
}
_AHEAD = 2  # gathers that may exist before the compute stream has taken over the first of them


def lay_out(step: RecordedStep, micro_batches: int) -> list[Event]:
    """Return the events of a step of ``micro_batches``, of which at most two were recorded.

    Where only the last micro-batch reduces gradients, those in the middle are like the last without its reductions.
    """
    if micro_batches < 2 or len(step.starts) < 2:
        return step.events
    begin, end = step.starts[-1], step.update
    events = step.events[:begin]
    reduces_once = not any(isinstance(event, Collective) and event.stream == REDUCTIONS for event in events)
    for _ in range(micro_batches - 2):
        _append_copy(events, step.events, begin, end, without_reductions=reduces_once)
    _append_copy(events, step.events, begin, len(step.events), without_reductions=False)
    return events


def _append_copy(into: list[Event], events: Sequence[Event], begin: int, end: int, without_reductions: bool) -> None:
    """Append the events from ``begin`` to ``end``, whose places change."""
    moved_to: dict[int, int] = {}
    for place in range(begin, end):
        event = events[place]
        reduces = isinstance(event, Collective) and event.stream == REDUCTIONS
        if without_reductions and (reduces or (isinstance(event, Kernel) and event.op == "chunk_cat")):
            continue
        moved_to[place] = len(into)
        waits = tuple(moved_to[wait] for wait in event.waits if wait in moved_to)
        if isinstance(event, Collective):
            into.append(replace(event, waits=waits, after=moved_to.get(event.after, -1)))
        else:
            into.append(replace(event, waits=waits))


@dataclass(frozen=True)
class SimulatedStep:
    """The time of a step.

    Args:
        seconds: of the whole step.
        by_kind: kind of time, of ``KINDS`` → seconds; they add up to ``seconds``.
        hidden: seconds of communication beside computing.
    """

    seconds: float
    by_kind: dict[str, float]
    hidden: float = 0.0

    def continued(self, shorter: "SimulatedStep", times: int) -> "SimulatedStep":
        """Return this step with ``times`` more of what it has more than ``shorter``."""
        by_kind = {kind: max(0.0, ms + times * (ms - shorter.by_kind[kind])) for kind, ms in self.by_kind.items()}
        hidden = self.hidden + times * (self.hidden - shorter.hidden)
        return SimulatedStep(self.seconds + times * (self.seconds - shorter.seconds), by_kind, hidden)


@dataclass
class Timeline:
    """The events of a step as arrays, whose time can be computed for many machines.

    Args:
        events: kernels and collectives, in the order in which the host starts them.
        devices_per_node: devices of a node.
        tf32: whether products in float32 use TF32.

    Attributes:
        launched: how many kernels, graphs and collectives the host starts before each event, and as long as how many
            further ones it works for compiled graphs.
        hooked: how many hooks of FSDP2 and of ZeRO-3 the host runs before it starts each event.
    """

    events: Sequence[Event]
    devices_per_node: int
    tf32: bool = False
    launched: "numpy.ndarray" = field(init=False)
    hooked: "numpy.ndarray" = field(init=False)
    _points: list[tuple[int, int, str, tuple[int, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        kernels = [event for event in self.events if isinstance(event, Kernel)]
        self._flops = numpy.array([kernel.flops for kernel in kernels], dtype=float)
        self._bytes = numpy.array([kernel.read + kernel.written for kernel in kernels], dtype=float)
        self._sizes = numpy.array([kernel.size for kernel in kernels])
        self._transcendental = numpy.array([kernel.count_elements(TRANSCENDENTAL) for kernel in kernels])
        self._random = numpy.array([kernel.count_elements(RANDOM) for kernel in kernels])
        rates = [(kernel.kind, self._precision_of(kernel)) for kernel in kernels]
        self._rates = sorted(set(rates))
        place_of = {rate: place for place, rate in enumerate(self._rates)}
        self._rate = numpy.array([place_of[rate] for rate in rates], dtype=int)
        self._convolutions = numpy.array([kernel.convolutions for kernel in kernels], dtype=float)
        self._enters = numpy.array([kernel.enters for kernel in kernels], dtype=float)
        self._hooks = numpy.array([kernel.hooks for kernel in kernels])
        self._kind = numpy.array([_COMPUTED.index(_kind_of_time(kernel)) for kernel in kernels], dtype=int)
        self._find_points()

    def _precision_of(self, kernel: Kernel) -> str:
        if kernel.kind == ELEMENTWISE:
            return ""
        if kernel.kind == PRODUCT and kernel.dtype == "float32" and self.tf32:
            return TF32
        return kernel.dtype

    def _find_points(self) -> None:
        """List the places between kernels at which streams wait for one another: (kernels before, event, what)."""
        self._points = []
        self._places = []  # of the kernels
        launches: list[int] = []
        hooks = numpy.zeros((len(self.events), 2))  # of FSDP2, of ZeRO-3
        in_graph = False
        for place, event in enumerate(self.events):
            before = len(self._places)
            captured = enters = False
            if isinstance(event, Kernel):
                captured, enters = event.captured, event.enters
            launches.append(_GRAPH_LAUNCHES * enters + (not (captured and in_graph and not enters)))
            in_graph = captured
            if isinstance(event, Collective):
                hooks[place, 0] = event.hooked
                self._points.append((before, place, "start", event.waits))
                continue
            if event.waits:
                self._points.append((before, place, "wait", event.waits))
            self._places.append(place)
            if event.reads_value:
                self._points.append((before + 1, place, "read", ()))
        self._points.append((len(self._places), len(self.events), "end", ()))
        self.launched = numpy.cumsum(launches, dtype=int) - 1
        hooks[self._places, 1] = self._hooks
        self.hooked = numpy.cumsum(hooks, axis=0)

    def precisions(self) -> set[str]:
        """Return the dtypes of which the time needs a peak."""
        return {precision for kind, precision in self._rates if kind != ELEMENTWISE}

    def kernel_seconds(self, machine: Machine) -> "numpy.ndarray":
        """Return the seconds of each kernel on the device: the longer of its FLOPs and its bytes."""
        rates = numpy.array([_flops_per_s(machine, *rate) for rate in self._rates])
        computing = self._flops / rates[self._rate]
        sized = self._sizes > 0
        halves = numpy.array([machine.of_dtype(dtype, _HALVES[kind]) for kind, dtype in self._rates])[self._rate]
        computing[sized] *= 1 + halves[sized] / self._sizes[sized]
        cached = numpy.minimum(self._bytes, machine.cache_mib * 2**20)
        moving = (self._bytes - cached) / (machine.gb_per_s * 1e9 * machine.bandwidth_share)
        moving += cached / (machine.cached_gb_per_s * 1e9)
        computing += self._transcendental * machine.transcendental_ns * 1e-9 + self._random * machine.random_ns * 1e-9
        return numpy.maximum(numpy.maximum(computing, moving), machine.kernel_us * 1e-6)

    def simulate(self, machine: Machine) -> SimulatedStep:
        """Return the time of the step on a machine."""
        return self._prepare(machine).run(self._points)

    def find_bounds(self, machine: Machine) -> dict[Moment, tuple[float]]:
        """Return the seconds that the step takes if the host is late at each moment alone; it takes about the most.

        The moments are those at which kernels start; the first entry, of no moment, is a host that is never late.
        """
        run = self._prepare(replace(machine, host_us=0.0, sharding_us=0.0, fetching_us=0.0))
        seconds = run.run(self._points).seconds
        bounds = {Moment("", "", ""): (seconds,)}
        micro_batch, phase = 0, ""
        begins = iter(run.begins.tolist())
        for event, starts in zip(self.events, self._find_starts(machine).tolist(), strict=True):
            if isinstance(event, Collective):
                continue
            if event.phase == "forward" and phase != "forward":
                micro_batch += 1
            phase = event.phase
            moment = Moment(f"{phase} {micro_batch}", event.module, event.op)
            bound = (seconds + starts - next(begins),)
            bounds[moment] = max(bound, bounds.get(moment, bound))
        return bounds

    def _find_starts(self, machine: Machine) -> "numpy.ndarray":
        """Return the seconds after which the host starts each event, if it never waits."""
        hooks = self.hooked @ numpy.array([machine.sharding_us, machine.fetching_us])
        return (self.launched * machine.host_us + hooks) * 1e-6

    def _prepare(self, machine: Machine) -> "_Streams":
        seconds, starts = self.kernel_seconds(machine), numpy.zeros(len(self.events))
        hooks = numpy.zeros(len(seconds))
        if machine.runs_ahead:
            starts = self._find_starts(machine)
        else:
            update_us = machine.host_us if machine.update_us is None else machine.update_us
            is_update = self._kind == _COMPUTED.index("optimizer")
            seconds = seconds + numpy.where(is_update, update_us, machine.host_us) * 1e-6
            seconds += self._convolutions * machine.convolution_us * 1e-6
            seconds += self._enters * _GRAPH_LAUNCHES * machine.host_us * 1e-6
            hooks = self._hooks * machine.fetching_us * 1e-6
        done = numpy.concatenate([[0.0], numpy.cumsum(seconds + hooks)])
        computed = numpy.bincount(self._kind, seconds, len(KINDS))
        by_kind: dict[str, float] = dict(zip(KINDS, computed.tolist(), strict=True))
        by_kind[_LAUNCHES] += float(hooks.sum())
        run = _Streams(self, machine, by_kind, starts)
        run.lead = starts[self._places] - done[:-1]  # when the host starts a kernel, less the kernels before it
        run.done = done
        run.begins = numpy.zeros(len(seconds))
        return run


def _kind_of_time(kernel: Kernel) -> str:
    if kernel.phase == "optimizer step":
        return "optimizer"
    return ATTENTION if kernel.kind == ATTENTION_BACKWARD else kernel.kind


def _flops_per_s(machine: Machine, kind: str, precision: str) -> float:
    """Return the FLOP/s that large kernels reach; infinitely many of those that are bound by memory."""
    if kind == ELEMENTWISE:
        return float("inf")
    peak = machine.peak_flops[precision]
    if kind == PRODUCT:
        return peak * machine.product_share[precision]
    return peak * machine.of_dtype(precision, "attention_share" if kind == ATTENTION else "attention_backward_share")


class _Streams:
    """The clocks of the streams while a step is simulated."""

    lead: "numpy.ndarray"
    done: "numpy.ndarray"
    begins: "numpy.ndarray"  # of each kernel

    def __init__(
        self, timeline: Timeline, machine: Machine, by_kind: dict[str, float], starts: "numpy.ndarray"
    ) -> None:
        self.timeline, self.machine, self.by_kind = timeline, machine, by_kind
        self.starts = starts.tolist()  # when the host starts each event, if it never waits
        self.compute = 0.0  # when the compute stream is free
        self.late = 0.0  # by how much the host is later than if it never waited
        self.waited = False  # the host has just waited for the device
        self.free: dict[str, float] = {}
        self.spans: dict[int, tuple[float, float]] = {}  # place of a collective → its seconds, when it ends
        self.disturbing: dict[int, float] = {}  # place of a collective → the share of computing that it takes
        self.gathers: list[int] = []
        self.taken: dict[int, float] = {}  # place of a gather → when the compute stream has taken it over
        self.hidden = 0.0

    def run(self, points: Sequence[tuple[int, int, str, tuple[int, ...]]]) -> SimulatedStep:
        first = 0
        for end, place, what, waits in points:
            if end > first:
                self._compute(first, end)
                first = end
            if what == "start":
                self._start(place)
            elif what == "wait":
                for wait in waits:
                    self._wait(wait)
            elif what == "read":
                self.late = max(self.late, self.compute - self.starts[place])
                self.waited = True
        last = max([self.compute, *self.free.values()])
        self.by_kind[_EXPOSED] += last - self.compute
        return SimulatedStep(last, self.by_kind, self.hidden)

    def _compute(self, first: int, end: int) -> None:
        """Run the kernels from ``first`` to ``end`` one after the other, none before the host starts it."""
        begins = free = self.compute - float(self.done[first])
        if self.machine.runs_ahead:
            begins = max(free, float(self.lead[first:end].max()) + self.late)
        self.by_kind[_WAITING if self.waited else _LAUNCHES] += begins - free
        self.waited = self.waited and begins == free
        self.begins[first:end] = begins + self.done[first:end]
        self.compute = begins + float(self.done[end])

    def _start(self, place: int) -> None:
        event = self.timeline.events[place]
        assert isinstance(event, Collective)
        if event.hooked and not self.machine.runs_ahead:
            self.compute += self.machine.sharding_us * 1e-6
            self.by_kind[_LAUNCHES] += self.machine.sharding_us * 1e-6
        what = event.kind, event.nbytes, event.ranks, self.machine
        seconds = collective_seconds(*what, self.timeline.devices_per_node)
        if seconds:
            # Moving data disturbs computing, and waiting for a slow network does not.
            moving = collective_seconds(*what, devices_per_node=max(event.ranks) + 1)
            self.disturbing[place] = (1 - self.machine.overlap) * min(1.0, moving / seconds)
        ready = [self.starts[place] + self.late, self.free.get(event.stream, 0.0)]
        if event.after >= 0 or not self.machine.runs_ahead:
            ready.append(self.compute)
        ready += [self.spans[wait][1] for wait in event.waits]
        if event.stream == GATHERS:
            if len(self.gathers) >= _AHEAD:
                ready.append(self.taken.get(self.gathers[-_AHEAD], 0.0))
            self.gathers.append(place)
        self.free[event.stream] = max(ready) + seconds
        self.spans[place] = seconds, max(ready) + seconds

    def _wait(self, place: int) -> None:
        """Let the compute stream wait for a collective, which has disturbed it meanwhile."""
        seconds, end = self.spans[place]
        if place in self.taken:
            return
        hidden = max(0.0, seconds - max(0.0, end - self.compute))
        disturbed = self.compute + self.disturbing.get(place, 0.0) * hidden
        self.hidden += hidden
        self.by_kind[_EXPOSED] += max(disturbed, end) - self.compute
        self.compute = self.taken[place] = max(disturbed, end)


def simulate_step(step: RecordedStep, machine: Machine, devices_per_node: int, tf32: bool = False) -> SimulatedStep:
    """Return the time of a recorded step on a machine.

    Args:
        step: what was recorded.
        machine: its devices and links.
        devices_per_node: devices of a node.
        tf32: whether products in float32 use TF32.
    """
    most = min(step.micro_batches, MOST_LAID_OUT)
    simulated = Timeline(lay_out(step, most), devices_per_node, tf32).simulate(machine)
    if step.micro_batches == most:
        return simulated
    shorter = Timeline(lay_out(step, most - 1), devices_per_node, tf32).simulate(machine)
    return simulated.continued(shorter, step.micro_batches - most)
