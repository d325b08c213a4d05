"""Simulate the CUDA caching allocator: which block each allocation gets, and what the allocator reserves for them."""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_fasttrain.memory.allocation_trace import FOR_EVER, Allocation

MIB = 2**20
MIN_BLOCK_BYTES = 512  # blocks are multiples of this many bytes
LARGEST_SMALL, SMALL_SEGMENT = MIB, 2 * MIB
SMALLEST_OWN, SHARED_SEGMENT = 10 * MIB, 20 * MIB  # from this size on, a block has a segment of its own
SEGMENT_GRANULE = 2 * MIB


@dataclass(eq=False)
class _Block:
    size: int
    address: int
    small: bool
    before: "_Block | None" = None
    after: "_Block | None" = None
    is_free: bool = True


@dataclass
class CachingAllocator:
    """The caching allocator of one CUDA stream, on addresses without memory.

    Attributes:
        reserved: bytes that it holds from the driver; never returned, as in a run without out-of-memory errors.

    Source:
        ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings: best fit, splitting, merging, two pools.
    """

    reserved: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})

    def allocate(self, nbytes: int) -> _Block:
        """Return a block of at least ``nbytes``."""
        size = max(MIN_BLOCK_BYTES, _round_up(nbytes, MIN_BLOCK_BYTES))
        small = size <= LARGEST_SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, 0))
        block = free.pop(place)[2] if place < len(free) else self._reserve(size, small)
        block.is_free = False
        left = block.size - size
        if left >= MIN_BLOCK_BYTES if small else left > LARGEST_SMALL:
            rest = _Block(left, block.address + size, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._insert(rest)
        return block

    def free(self, block: _Block) -> None:
        """Take ``block`` back and merge it with free neighbors."""
        before, after = block.before, block.after
        block.is_free = True
        if after is not None and after.is_free:
            self._remove(after)
            _merge(block, after)
        if before is not None and before.is_free:
            self._remove(before)
            _merge(before, block)
            block = before
        self._insert(block)

    def _reserve(self, size: int, small: bool) -> _Block:
        if small:
            nbytes = SMALL_SEGMENT
        elif size < SMALLEST_OWN:
            nbytes = SHARED_SEGMENT
        else:
            nbytes = _round_up(size, SEGMENT_GRANULE)
        segment = _Block(nbytes, self.reserved, small)
        self.reserved += nbytes
        return segment

    def _insert(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]


def place_in_blocks(allocations: Iterable[Allocation]) -> int:
    """Set the size of each allocation to that of its block; return the bytes that the allocator reserves for all.

    A block can be larger than its allocation: what is left is split off only where it can be used again.
    """
    events: list[tuple[int, bool, Allocation]] = []
    for allocation in allocations:
        if allocation.nbytes:
            events.append((allocation.born, True, allocation))
            if allocation.died < FOR_EVER:
                events.append((allocation.died, False, allocation))
    allocator, blocks = CachingAllocator(), {}
    # Times differ.
    for _, is_birth, allocation in sorted(events, key=lambda event: event[0]):
        if is_birth:
            blocks[id(allocation)] = allocator.allocate(allocation.nbytes)
            allocation.nbytes = blocks[id(allocation)].size
        else:
            allocator.free(blocks.pop(id(allocation)))
    return allocator.reserved


def _merge(block: _Block, after: _Block) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
