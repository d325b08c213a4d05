import gc
import random

import pytest
import torch

from lightning_fasttrain.memory.caching_allocator import MIB, CachingAllocator


def test_small_allocations_share_a_segment_of_two_mebibytes():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(100) for _ in range(4096)]
    assert (blocks[0].size, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_medium_allocations_share_a_segment_of_twenty_mebibytes():
    allocator = CachingAllocator()
    for _ in range(4):
        assert allocator.allocate(5 * MIB).size == 5 * MIB
    assert allocator.reserved == 20 * MIB


def test_large_allocations_have_segments_in_multiples_of_two_mebibytes():
    allocator = CachingAllocator()
    # Less than a mebibyte that is left is not split off.
    assert allocator.allocate(int(11.5 * MIB)).size == 12 * MIB
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    assert allocator.reserved == 24 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    wide, narrow = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(18 * MIB).address == narrow.address
    assert allocator.reserved == 60 * MIB


def test_a_free_block_between_used_ones_is_fragmented():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 40 * MIB  # 10 MiB are free in the first segment, in two parts
    for block in blocks[1::2]:
        allocator.free(block)
    allocator.allocate(18 * MIB)
    assert allocator.reserved == 40 * MIB


@pytest.mark.gpu
def test_random_allocations_are_placed_as_on_cuda():
    gc.collect()  # nothing of an earlier test may be freed meanwhile
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    choose, allocator, held = random.Random(0), CachingAllocator(), []
    for _ in range(2000):
        if held and choose.random() < 0.45:
            tensor, block = held.pop(choose.randrange(len(held)))
            del tensor
            allocator.free(block)
        else:
            nbytes = int(2 ** choose.uniform(5, 26))
            held.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), allocator.allocate(nbytes)))
        assert torch.cuda.memory_allocated() - allocated == sum(block.size for _, block in held)
    # Of equal free blocks the allocator takes the one at the lower address, which is the driver's choice.
    assert allocator.reserved == pytest.approx(torch.cuda.memory_reserved() - reserved, rel=0.05)
