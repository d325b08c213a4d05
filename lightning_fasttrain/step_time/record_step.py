"""Record what a traced step computes and communicates: its kernels with FLOPs and bytes, and its collectives."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.fake_mode import is_strided
from lightning_fasttrain.memory.allocation_trace import Allocation, AllocationTrace, Call, Recorder
from lightning_fasttrain.memory.kernel_flops import flops_of
from lightning_fasttrain.memory.memory_report import Moment, find_moments
from lightning_fasttrain.memory.one_rank import OneRank

PRODUCT, ATTENTION, ATTENTION_BACKWARD, ELEMENTWISE = "products", "attention", "attention backward", "element-wise"
GATHERS, REDUCTIONS, EXCHANGES = "gathers", "reductions", "exchanges"  # streams of collectives
_FREE_NAMESPACES, _COMMUNICATION = ("profiler", "prim"), ("c10d", "_c10d_functional")
# They allocate or describe a tensor, and run no kernel.
_FREE = {"detach", "lift_fresh", "_unsafe_view", "set_", "resize_", "_reshape_alias", "is_same_size", "wait_tensor"}
# Operators whose elements take a CPU longer to compute than to move.
TRANSCENDENTAL = {"exp", "log", "sin", "cos", "tanh", "erf", "sigmoid", "logsumexp", "softplus", "mish", "elu"}
TRANSCENDENTAL |= {"silu", "silu_backward", "gelu", "gelu_backward", "_softmax", "_safe_softmax", "_log_softmax"}
TRANSCENDENTAL |= {"_log_softmax_backward_data", "sqrt", "rsqrt"}
RANDOM = {"bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "rand", "randn", "native_dropout"}
_CONVOLUTIONS = {"convolution": 0, "convolution_backward": 1}  # → place of the inputs, which the weight follows
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "_foreach_copy_"}
# Of their first argument they read, or write, as many values as the other side has.
_GATHERS_ROWS = {"embedding", "index", "index_select", "gather", "nll_loss_forward"}
_WRITES_ROWS = {"index_put_", "_index_put_impl_", "index_add_", "scatter_add_", "scatter_"}
_COLLECTIVES = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("allreduce", "all_reduce"),
    "all-to-all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a step.

    Args:
        op: the operator, without its overload.
        kind: ``"products"``, ``"attention"``, ``"attention backward"`` or ``"element-wise"``, which is all the rest.
        phase: ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"optimizer step"``.
        module: qualified name of the running module.
        dtype: of its last factor, or of its first tensor, as ``"bfloat16"``.
        flops: multiplications and additions; of causal attention half of the square, where its kernel skips the rest.
        read: bytes that it reads.
        written: bytes that it writes.
        shapes: shapes of the tensors among its arguments; empty for operators on lists of tensors.
        waits: places in the step of the collectives that must be done before it.
        reads_value: whether the host waits for its result, as in ``.item()``.
        captured: whether it is part of a captured graph, which the host starts as a whole.
        enters: whether it is the first kernel of a compiled graph.
        hooks: modules whose hooks of ZeRO-3 run at it, in Python, which keep the host busy for ``fetching_us`` each.
    """

    op: str
    kind: str
    phase: str
    module: str
    dtype: str
    flops: int
    read: int
    written: int
    shapes: tuple[tuple[int, ...], ...] = ()
    waits: tuple[int, ...] = ()
    reads_value: bool = False
    captured: bool = False
    enters: bool = False
    hooks: float = 0.0

    @property
    def size(self) -> float:
        """Geometric mean of the three sizes of a matrix product, the length of an attention; 0 of other kernels.

        Of convolutions in groups it is the harmonic mean, since few channels make them slow.
        """
        if self.kind in (ATTENTION, ATTENTION_BACKWARD) and "scaled_dot" in self.op:  # others have no axis of the batch
            first = int(self.kind == ATTENTION_BACKWARD)  # after the gradient
            return math.sqrt(self.shapes[first][-2] * self.shapes[first + 1][-2])
        if self.kind != PRODUCT or not self.flops:  # of an empty batch, or of frozen weights
            return 0.0
        count = 1
        if self.op in ("bmm", "baddbmm", "_grouped_mm"):
            count = self.shapes[-1][0]  # of the ends of the groups, too
        elif "_rnn" in self.op:  # one product after the other, for each place of the sequence
            count = self.shapes[0][0]
        if self.op in _CONVOLUTIONS:
            inputs, weight = self.shapes[_CONVOLUTIONS[self.op] :][:2]
            count = max(inputs[1] // weight[1], 1)
            if count > 1:
                channels, window = max(weight[0] // count, 1), math.prod(weight[1:])
                rows = self.flops / 2 / count / channels / window
                return 3 / (1 / rows + 1 / channels + 1 / window)
        return (self.flops / 2 / max(count, 1)) ** (1 / 3)

    @property
    def convolutions(self) -> int:
        """Number of convolutions: two of a backward, for the gradients of inputs and weight, and 0 of other kernels."""
        if not self.op.startswith("convolution"):
            return 0
        return 2 if self.op.startswith("convolution_backward") else 1

    def count_elements(self, ops: Collection[str]) -> float:
        """Return how many elements the kernel writes; 0 unless it is one of some operators."""
        if self.op not in ops or not self.dtype:
            return 0.0
        return self.written / getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step.

    Args:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or ``"broadcast"``.
        nbytes: size of the unsharded tensor.
        ranks: the ranks that take part.
        stream: ``"gathers"``, ``"reductions"``, or ``"exchanges"`` of activations.
        after: place of the kernel that writes its input; -1 if that was written before.
        waits: places of the collectives that must be done before it.
        hooked: whether FSDP2's hooks start it, in Python, which keep the host busy for a machine's ``sharding_us``.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    stream: str
    after: int = -1
    waits: tuple[int, ...] = ()
    hooked: bool = False


Event = Kernel | Collective


@dataclass
class RecordedStep:
    """The kernels and collectives of one step on one rank, in the order in which the host starts them.

    Args:
        events: they, of at most two micro-batches and the optimizer's update.
        starts: place of the first event of each micro-batch.
        update: place of the first event of the optimizer's update.
        gradients: (place of the next event, bytes) of each gradient that is complete.
        micro_batches: number of micro-batches of the real step.
    """

    events: list[Event] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    update: int = 0
    gradients: list[tuple[int, int]] = field(default_factory=list)
    micro_batches: int = 1

    @property
    def kernels(self) -> Iterator[Kernel]:
        """The kernels alone."""
        return (event for event in self.events if isinstance(event, Kernel))

    def model_flops(self) -> int:
        """Return the FLOPs of all micro-batches without recomputation, with attention in full, as MFU counts them."""
        total = 0
        for kernel in self.kernels:
            if kernel.phase not in ("forward", "backward"):
                continue
            causal = 2 if kernel.op.endswith(_CAUSAL) else 1
            # Of five products in the backward of fused attention, one is a recomputation.
            total += kernel.flops * causal * 4 // (5 if kernel.kind == ATTENTION_BACKWARD else 4)
        return total * self.micro_batches // max(len(self.starts), 1)


_CAUSAL = " (causal)"
_BLOCK_ON_A_CPU = 512  # keys that torch's attention there multiplies at a time
_READ = torch.ops.aten._local_scalar_dense.default


class StepRecorder(Recorder):
    """Records the steps that an :class:`AllocationTrace` runs; views and allocations cost nothing.

    In compiled blocks, kernels between two products are one kernel, which reads what was made outside of it and writes
    what still exists after it.

    Args:
        fuses: whether blocks are compiled.
        captures: whether they are captured graphs, too.

    Attributes:
        steps: the last step of each finished trace; there are several where values that code reads are assumed.
        batches: number of batches whose gradients a step sums.
        rank: the rank that was traced.
        moments: the most bytes at each moment of the steps, and those of states among them, without the rounding of a
            caching allocator.
    """

    batches: int
    rank: OneRank

    def __init__(self, fuses: bool = False, captures: bool = False) -> None:
        self.fuses, self.captures = fuses, captures
        self.steps: list[RecordedStep] = []
        self.moments: dict[Moment, tuple[int, int]] = {}
        self._compiled: dict[str, str] = {}  # name of a module in a compiled block → that of the block
        self.begin_step()

    def begin_step(self) -> None:
        self._step = RecordedStep()
        self._phase = ""
        self._writers: dict[int, int] = {}  # allocation → place of the kernel that wrote it last
        self._pending: dict[int, int] = {}  # allocation → place of the collective that fills it
        self._last_reduction: int | None = None
        self._fused: _FusedGroup | None = None
        self._entered: set[tuple[str, str, int]] = set()  # compiled graphs, by block, phase and micro-batch

    def watch(self, model: nn.Module) -> None:
        if self.fuses:
            for name, block in find_blocks(model).items():
                self._compiled |= {inner: name for inner, _ in block.named_modules(prefix=name)}

    def finish(self, micro_batches: int, batches: int, rank: object) -> None:
        assert isinstance(rank, OneRank)
        self._close_group()
        self._step.micro_batches = micro_batches
        if self._phase != "optimizer step":
            self._step.update = len(self._step.events)
        self.steps.append(self._step)
        self.batches, self.rank = batches, rank

    def note_memory(self, allocations: Sequence[Allocation], since: int) -> None:
        for moment, held in find_moments(allocations, since).items():
            self.moments[moment] = max(held, self.moments.get(moment, held))

    def note_gradient(self, gradient: Tensor) -> None:
        self._step.gradients.append((len(self._step.events), gradient.nbytes))

    def note(self, trace: AllocationTrace, call: Call, result: object, phase: str, module: str) -> None:
        func = call[0]
        if _is_free(func):
            return
        self._enter_phase(phase)
        if func.namespace in _COMMUNICATION:
            self._close_group()
            self._note_collective(trace, call, result)
        elif func is not _READ:
            with torch._C.DisableTorchFunction():
                self._note_kernel(trace, call, result, phase, module)
        # The counts of steps that optimizers read, some in the backward, are in host memory.
        elif phase == "forward":
            self._close_group()
            self._step.events.append(Kernel("item", ELEMENTWISE, phase, module, "", 0, 0, 0, reads_value=True))

    def _note_kernel(self, trace: AllocationTrace, call: Call, result: object, phase: str, module: str) -> None:
        key, given = trace.key
        if key is None:
            given = list(_tensors_in((*call[1], *call[2].values())))
        tensors = [*given, *_tensors_in([result])]
        known = _know_kernel(key, call, result, tensors)
        reads, into = _find_owners(trace, tensors, known.reads), _find_owners(trace, tensors, known.writes)
        waits = self._find_waits(call[0].overloadpacket.__name__, reads, into, phase)
        if not self._fuse(known.kernel.kind, module, phase, reads, into, waits):
            self._append(_place(known.kernel, phase, module, waits), into)

    def _append(self, kernel: Kernel, into: "Owned") -> None:
        if kernel.op != "all_gather_copy_in":  # FSDP2 runs it in the stream of its gathers
            for owner, _ in into:
                self._writers[id(owner)] = len(self._step.events)
        block = self._compiled.get(kernel.module)
        if block is not None:
            graph = block, kernel.phase, len(self._step.starts)
            kernel = replace(kernel, captured=self.captures, enters=graph not in self._entered)
            self._entered.add(graph)
        self._step.events.append(kernel)

    def _enter_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._close_group()
        if phase == "forward":
            self._step.starts.append(len(self._step.events))
        if phase == "optimizer step":
            self._step.update = len(self._step.events)
        self._phase = phase

    def _find_waits(self, name: str, reads: "Owned", writes: "Owned", phase: str) -> tuple[int, ...]:
        waits = set()
        for owner, _ in reads:
            place = self._pending.get(id(owner))
            if place is None:
                continue
            # What follows a reduction in a backward is in its stream; the update waits for it.
            if phase != "optimizer step" and self._stream_of(place) == REDUCTIONS:
                self._pending.update((id(written), place) for written, _ in writes)
            else:
                waits.add(place)
        # FSDP2 fills the input of a reduction when the one before is done.
        if name == "chunk_cat" and self._last_reduction is not None:
            waits.add(self._last_reduction)
        return tuple(sorted(waits))

    def _stream_of(self, place: int) -> str:
        event = self._step.events[place]
        return event.stream if isinstance(event, Collective) else ""

    def _note_collective(self, trace: AllocationTrace, call: Call, result: object) -> None:
        func, args, _ = call
        kind = _kind_of_collective(func.overloadpacket.__name__)
        if not kind:
            return
        functional = func.namespace == "_c10d_functional"
        inputs = list(_tensors_in(args))
        outputs = list(_tensors_in([result] if functional else args[:1]))
        stream = EXCHANGES if functional else REDUCTIONS
        if kind in ("all-gather", "broadcast") and not functional:
            stream = GATHERS
        place = len(self._step.events)
        with torch._C.DisableTorchFunction():
            sources = [id(owner) for owner in map(trace.allocation_of, inputs) if owner is not None]
            after = max((self._writers.get(source, -1) for source in sources), default=-1)
            waits = {self._pending[source] for source in sources if source in self._pending}
            # The unsharded tensor is the input or the output, and one of several arguments.
            sides = (inputs[:1], inputs[1:], outputs)
            nbytes = max(_total(_measure(side)) for side in sides)
            self._pending.update((id(owner), place) for owner in map(trace.allocation_of, outputs) if owner is not None)
        if stream == REDUCTIONS:
            self._last_reduction = place
        hooked = not functional
        self._step.events.append(Collective(kind, nbytes, _ranks_of(args), stream, after, tuple(sorted(waits)), hooked))

    def _fuse(
        self,
        kind: str,
        module: str,
        phase: str,
        reads: "Owned",
        writes: "Owned",
        waits: tuple[int, ...],
    ) -> bool:
        """Add a kernel to the open group, if its block is compiled; return whether it was."""
        inside = kind == ELEMENTWISE and module in self._compiled
        if not inside or waits:
            self._close_group()
            return False
        if self._fused is None:
            self._fused = _FusedGroup(phase, module)
        for owner, nbytes in reads:
            if id(owner) not in self._fused.written:
                self._fused.read[id(owner)] = nbytes
        for owner, nbytes in writes:
            self._fused.written[id(owner)] = (owner, nbytes)
        return True

    def _close_group(self) -> None:
        if self._fused is None:
            return
        group, self._fused = self._fused, None
        kept = [(owner, nbytes) for owner, nbytes in group.written.values() if owner.alive]
        read = sum(group.read.values())
        self._append(Kernel("fused", ELEMENTWISE, group.phase, group.module, "", 0, read, _total(kept)), kept)


def note_call(step: RecordedStep, call: Call, result: object, phase: str) -> None:
    """Add an operator that has run on real tensors to a step; views, allocations and collectives add nothing."""
    func = call[0]
    if func is _READ and phase != "optimizer step":
        step.events.append(Kernel("item", ELEMENTWISE, phase, "", "", 0, 0, 0, reads_value=True))
    elif func is not _READ and not _is_free(func) and func.namespace not in _COMMUNICATION:
        step.events.append(_describe_kernel(call, result, *_find_moved(call, result), phase, ""))


class _KnownKernel(NamedTuple):
    """A kernel at any place of a step, and the places of the tensors that it moves among ``tensors``, with bytes."""

    kernel: Kernel
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]


_MOST_KERNELS = 50_000
_kernels: dict[tuple[Any, ...], _KnownKernel] = {}  # by what decides them: the arguments of their operator


def _know_kernel(key: tuple[Any, ...] | None, call: Call, result: object, tensors: Sequence[Tensor]) -> _KnownKernel:
    """Describe a kernel, or return what was described for the same key; ``tensors`` are its arguments and results."""
    known = None if key is None else _kernels.get(key)
    if known is not None:
        return known
    reads, writes = _find_moved(call, result)
    kernel = _describe_kernel(call, result, reads, writes, "", "")
    place_of = {id(tensor): place for place, tensor in enumerate(tensors)}

    def find_places(moved: Moved) -> tuple[tuple[int, int], ...]:
        return tuple((place_of[id(tensor)], nbytes) for tensor, nbytes in moved)

    known = _KnownKernel(kernel, find_places(reads), find_places(writes))
    if key is not None:
        if len(_kernels) >= _MOST_KERNELS:
            _kernels.clear()
        _kernels[key] = known
    return known


def _describe_kernel(call: Call, result: object, reads: "Moved", writes: "Moved", phase: str, module: str) -> Kernel:
    func, args, _ = call
    name = func.overloadpacket.__name__
    kind, flops = _count_flops(call, result)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    typed = [*tensors, *(tensor for tensor, _ in (*reads, *writes))]
    if kind == PRODUCT:  # with a bias, only the last tensor is a factor for sure
        typed = [tensor for tensor in tensors[::-1] if tensor.is_floating_point()] or tensors[::-1]
    dtype = str(typed[0].dtype).removeprefix("torch.") if typed else ""
    if kind in (ATTENTION, ATTENTION_BACKWARD) and _is_causal(call) and _skips_what_is_masked(name, shapes):
        flops, name = flops // 2, f"{name}{_CAUSAL}"
    elif name in _CONVOLUTIONS and args[_CONVOLUTIONS[name] + 6]:
        name = f"{name} (transposed)"  # the dimensions of its weight are the other way round
    return Kernel(name, kind, phase, module, dtype, flops, _total(reads), _total(writes), shapes)


def _place(kernel: Kernel, phase: str, module: str, waits: tuple[int, ...]) -> Kernel:
    """Return a kernel at its place in a step, as ``dataclasses.replace`` would in four times the time."""
    described = (kernel.dtype, kernel.flops, kernel.read, kernel.written, kernel.shapes)
    return Kernel(kernel.op, kernel.kind, phase, module, *described, waits)


Owned = Sequence[tuple[Allocation, int]]  # allocations with the bytes that are read or written


def _find_owners(trace: AllocationTrace, tensors: Sequence[Tensor], moved: Iterable[tuple[int, int]]) -> Owned:
    """Return the allocations of the tensors at some places that were traced."""
    owners = ((trace.allocation_of(tensors[place]), nbytes) for place, nbytes in moved)
    return [(owner, nbytes) for owner, nbytes in owners if owner is not None]


def _total(moved: Sequence[tuple[object, int]]) -> int:
    return sum(nbytes for _, nbytes in moved)


@dataclass
class _FusedGroup:
    """Kernels that a compiler makes one of: allocation → bytes that they read, or write."""

    phase: str
    module: str
    read: dict[int, int] = field(default_factory=dict)
    written: dict[int, tuple[Allocation, int]] = field(default_factory=dict)


@cache
def _is_free(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if func.namespace in _FREE_NAMESPACES or name in _FREE or func.is_view:
        return True
    return name.startswith(("empty", "new_empty"))


@cache
def _find_written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Return the arguments that an operator writes, by position and by name, and whether it returns new tensors."""
    places, names = [], []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            places.append(place)
            names.append(argument.name)
    return tuple(places), tuple(names), any(result.alias_info is None for result in func._schema.returns)


Moved = list[tuple[Tensor, int]]  # tensors with the bytes that are read or written


def _find_moved(call: Call, result: object) -> tuple[Moved, Moved]:
    """Return the tensors that a kernel reads and those that it writes, with bytes."""
    func, args, kwargs = call
    name = func.overloadpacket.__name__
    places, names, returns_new = _find_written(func)
    if name == "all_gather_copy_in":  # into a slice of a buffer for all ranks
        moved = _measure(args[0])
        return moved, moved
    writes = _measure([args[place] for place in places if place < len(args)])
    writes += _measure([kwargs[key] for key in names if key in kwargs])
    if returns_new:
        writes += _measure([result])
    # Outputs given by name are not read.
    others = [value for key, value in kwargs.items() if key not in names]
    first = 1 if name in _OVERWRITES else 0
    reads = _measure([*args[first:], *others])
    if name in _GATHERS_ROWS and reads:
        reads[0] = (reads[0][0], _total(writes))
    elif name in _WRITES_ROWS and writes:
        writes = [(writes[0][0], reads[-1][1])]
        reads[0] = (reads[0][0], reads[-1][1])
    return reads, writes


def _measure(values: Sequence[object]) -> Moved:
    """Return the tensors among ``values`` with their bytes."""
    return [(tensor, _bytes_in_memory(tensor)) for tensor in _tensors_in(values)]


def _bytes_in_memory(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of one that is expanded or has windows over others those that it is made of."""
    distinct, reach = 1, 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else min(size, 1)
        reach += (size - 1) * stride
    return max(0, min(distinct, reach)) * tensor.itemsize


def _tensors_in(values: Sequence[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if is_strided(value):
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _kind_of_collective(name: str) -> str:
    for kind, words in _COLLECTIVES.items():
        if any(word in name for word in words):
            return kind
    return ""


def _count_flops(call: Call, result: object) -> tuple[str, int]:
    """Return the kind of a kernel and its FLOPs."""
    func, args, kwargs = call
    flops = flops_of(func, args, kwargs, result)
    if flops is None:
        return ELEMENTWISE, 0
    name = func.overloadpacket.__name__
    if "attention" not in name:
        return PRODUCT, flops
    return (ATTENTION_BACKWARD if "backward" in name else ATTENTION), flops


def _skips_what_is_masked(op: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether causal attention computes half of the square: on a CPU only what fills blocks of its own is left out."""
    return "for_cpu" not in op or shapes[-1][-2] > 2 * _BLOCK_ON_A_CPU


def _is_causal(call: Call) -> bool:
    func, args, kwargs = call
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("is_causal", "causal"):
            by_name = kwargs.get(argument.name, argument.default_value)
            return bool(args[place] if place < len(args) else by_name)
    return False


def _ranks_of(args: Sequence[object]) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            return tuple(dist.get_process_group_ranks(_resolve_process_group(value)))  # type: ignore[arg-type]
        if isinstance(value, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(value))
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return ()
