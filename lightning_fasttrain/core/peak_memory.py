"""Measure the largest amount of tensor memory that is in use at once."""

import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import quantized_tensors

_Change = tuple[int, int, int]  # time in ns, address, bytes: negative when freed
COUNTED = ("cpu", "cuda")
_HELD = 0
_LOG_LEVEL = "KINETO_LOG_LEVEL"


def refuse_uncounted(what: str, device: torch.device) -> None:
    """Raise ``ValueError`` where torch does not record single allocations, as on Apple's and Intel's GPUs.

    Example:
        >>> refuse_uncounted("PeakMemory", torch.device("mps"))
        Traceback (most recent call last):
        ValueError: PeakMemory on mps: memory is counted on the CPU and on CUDA. Train there, or leave it out.
    """
    if device.type not in COUNTED:
        why = "memory is counted on the CPU and on CUDA"
        raise ValueError(explain(f"{what} on {device}", why, "Train there, or leave it out"))


@check_arguments
class PeakMemory:
    """Measures the largest number of bytes that tensors take at any moment inside a ``with`` block.

        peak_bytes = bytes at entry + added_bytes,    added_bytes = max over time of (allocated - freed since entry)

    On CUDA the allocator keeps count, for free: everything on the device is in, and ``held`` is not needed; all of what
    the private pools of CUDA graphs hold counts for ``peak_bytes``, as nothing else can use it. On the CPU torch keeps
    no count, so its profiler records every allocation of the block, which is exact but slows it down. What was there
    before is what ``held`` names; memory of theirs that is freed inside the block, such as gradients by
    ``zero_grad``, counts as freed. Not seen on the CPU: tensors that were there before and are not ``held``, storages
    that are resized in place, and memory that is not torch's (NumPy, shared memory of loader workers).

    Args:
        device: ``"cpu"`` or a CUDA device.
        held: what is in memory at entry: modules (parameters, buffers, gradients, what quantised layers keep),
            optimizers (their state), tensors, and lists, tuples and mappings of these. Shared storages count once.

    Blocks may lie inside one another on CUDA, where each has its own peak.

    Attributes:
        peak_bytes: the peak, with what was there at entry; set when the block ends.
        added_bytes: how far the peak is above the entry, at least 0.
        segments: the peak between each two calls of :meth:`mark`, the first from the entry and the last to the end.

    Raises:
        ValueError: another kind of device.
        RuntimeError: on the CPU, at entry, if another torch profiler is active.

    Example:
        >>> import torch
        >>> weight = torch.zeros(1000)
        >>> with PeakMemory("cpu", weight) as peak:
        ...     doubled = weight + weight
        ...     for _ in range(5):
        ...         temporary = doubled + weight
        ...         del temporary
        >>> peak.added_bytes, peak.peak_bytes
        (8000, 12000)

    Source:
        Ours. Checked on the CPU against sums by hand; on CUDA it is the caching allocator's own count.
    """

    def __init__(self, device: torch.device | str, *held: object) -> None:
        self.device = torch.device(device)
        refuse_uncounted("PeakMemory", self.device)
        self.peak_bytes = self.added_bytes = 0
        self.segments: list[int] = []
        self._held = held
        self._profile: profile | None = None
        self._marks: list[int] = []

    def __enter__(self) -> "PeakMemory":
        # Without this, a reference of ours would keep what the block frees.
        held, self._held = self._held, ()
        if self.device.type == "cuda":
            # The allocator's figures are an empty dictionary until CUDA is initialized.
            torch.cuda.init()
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._at_entry = _allocator_bytes(self.device, "current")
            _start_counting_again(self.device)
            self._peak_so_far = 0
            _OPEN_ON_CUDA.append(self)
            return self
        refuse_second_profiler("PeakMemory('cpu')")
        self._freed: list[_Change] = []
        self._late: list[dict[int, int]] = []
        self._watches: list[weakref.finalize] = []
        self._at_entry = 0
        self._counted: set[int] = set()
        # One for each address: tied weights and views share it.
        for storage in {storage.data_ptr(): storage for storage in find_storages(held)}.values():
            if storage.device.type == "cpu":
                self._counted.add(storage.data_ptr())
                self._at_entry += storage.nbytes()
                # torch keeps a storage's Python object as long as the memory lives, so this fires when that is freed.
                self._watches.append(weakref.finalize(storage, self._note_free, storage.nbytes()))
        self._profile = start_profile()
        return self

    def hold(self, batch: object) -> None:
        """Count a batch that is there already, or was made since the entry; of several, the largest.

        On CUDA all memory is counted in any case.
        """
        if self._profile is not None:
            # Addresses and sizes alone, so that the batch can be freed. What the block itself allocated is known at its
            # end.
            self._late.append({s.data_ptr(): s.nbytes() for s in find_storages(batch) if s.device.type == "cpu"})

    def mark(self) -> None:
        """End one segment of the block and begin another; on CUDA without waiting for the device."""
        if self._profile is not None:
            self._marks.append(time.time_ns())
        else:
            _start_counting_again(self.device)
            self.segments.append(self._peak_so_far)
            self._peak_so_far = 0

    def __exit__(self, *_: object) -> None:
        if self._profile is None:
            self.mark()
            _OPEN_ON_CUDA.remove(self)
        else:
            self._profile.stop()
            # Memory that is freed after the block is not one of its changes.
            for watch in self._watches:
                watch.detach()
            changes = [*self._freed, *_allocations(self._profile)]
            peaks = _peaks(changes, self._marks)
            self._at_entry += self._bytes_held_late({address for _, address, nbytes in changes if nbytes > 0})
            self.segments = [self._at_entry + peak for peak in peaks]
            self._profile = None
        self.peak_bytes = max(self.segments)
        self.added_bytes = self.peak_bytes - self._at_entry
        if self.device.type == "cuda":
            # At the peak some of it may have been in use, but no more was taken than the allocator has reserved.
            with_pools = min(self.peak_bytes + _unused_in_pools(self.device), torch.cuda.memory_reserved(self.device))
            self.peak_bytes = max(self.peak_bytes, with_pools)

    def _bytes_held_late(self, allocated: set[int]) -> int:
        known = self._counted | allocated
        most = 0
        for batch in self._late:
            most = max(most, sum(size for address, size in batch.items() if address not in known))
        return most

    def _note_free(self, nbytes: int) -> None:
        self._freed.append((time.time_ns(), _HELD, -nbytes))  # the clock of the profiler's events


_OPEN_ON_CUDA: list[PeakMemory] = []  # the allocator keeps one peak; who begins again leaves it to the others


def _start_counting_again(device: torch.device) -> None:
    peak = _allocator_bytes(device, "peak")
    for other in _OPEN_ON_CUDA:
        if other.device == device:
            other._peak_so_far = max(other._peak_so_far, peak)
    torch.cuda.reset_peak_memory_stats(device)


def _allocator_bytes(device: torch.device, which: str) -> int:
    """Read one figure of the allocator, without a flat dictionary of all its hundred figures."""
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"][which]


def _unused_in_pools(device: torch.device) -> int:
    """Return the bytes in private pools, such as those of CUDA graphs, that no tensor uses and no other can use."""
    pools = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in pools if part["device"] == device.index)


def refuse_second_profiler(what: str) -> None:
    """Refuse to record memory while another torch profiler is active.

    Args:
        what: what would record it, for the message.

    Raises:
        RuntimeError: another one is active.
    """
    if torch.autograd._profiler_enabled():
        why = "another torch profiler is active, and torch runs one at a time"
        raise RuntimeError(explain(what, why, "Measure outside of it, or give it profile_memory=True"))


def start_profile() -> profile:
    """Start torch's profiler of memory: of the host's activities alone, among which are CUDA's allocations."""
    started = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    # torch reads the level when the first profiler of a process starts, and prints a line for each start otherwise.
    is_new = _LOG_LEVEL not in os.environ
    os.environ.setdefault(_LOG_LEVEL, "6")
    try:
        started.start()
    finally:
        if is_new:
            del os.environ[_LOG_LEVEL]
    return started


def event_tree(finished: profile) -> list[Any]:
    """Return the outermost events of a profiler, with those inside them as their ``children``."""
    assert finished.profiler is not None
    assert finished.profiler.kineto_results is not None
    return list(finished.profiler.kineto_results.experimental_event_tree())


def _allocations(finished: profile) -> Iterator[_Change]:
    events = event_tree(finished)
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name == "[memory]" and event.typed[1].device.type == "cpu":
            yield event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size


def _peaks(changes: list[_Change], marks: Sequence[int]) -> list[int]:
    """The most that the changes sum up to between each two marks; at first also the 0 that they start from.

    The profiler reports a free only of what it has seen allocated, be it in an earlier block. So its word is taken
    for what this block allocated alone: what is held tells of its own end, and the rest was never counted.
    """
    now, peaks, ends = 0, [0], iter(marks)
    end = next(ends, math.inf)
    allocated: set[int] = set()
    for at, address, nbytes in sorted(changes):
        while at >= end:
            peaks.append(now)
            end = next(ends, math.inf)
        if nbytes > 0:
            allocated.add(address)
        elif address != _HELD:
            if address not in allocated:
                continue
            allocated.remove(address)
        now += nbytes
        peaks[-1] = max(peaks[-1], now)
    return peaks + [now] * (len(marks) + 1 - len(peaks))


def find_storages(held: object) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in an object, however they are packed."""
    if isinstance(held, Tensor):
        yield from _storages_of_tensor(held)
        return
    for part in _parts_of(held):
        yield from find_storages(part)


def _storages_of_tensor(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    # A sharded or quantised tensor is made of others.
    if is_traceable_wrapper_subclass(tensor):
        yield from find_storages([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
    elif tensor.layout is torch.sparse_coo:
        yield from find_storages((tensor._indices(), tensor._values()))
    elif tensor.layout is torch.strided and not is_lazy(tensor):
        yield tensor.untyped_storage()


def _parts_of(held: object) -> Iterable[Any]:
    if isinstance(held, nn.Module):
        gradients = [parameter.grad for parameter in held.parameters()]
        quantized = [tensor for _, tensor in quantized_tensors(held)]
        return [*held.parameters(), *gradients, *held.buffers(), *quantized]
    if isinstance(held, Optimizer):
        return list(held.state.values())
    if isinstance(held, Mapping):
        return list(held.values())
    return held if isinstance(held, list | tuple) else ()
