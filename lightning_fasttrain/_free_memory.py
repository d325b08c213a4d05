"""Floor: how much memory a device has left, and the unit that people think of it in."""

import ctypes
import gc
import sys
from pathlib import Path

import torch

GIB = 2**30


def free_bytes(device: torch.device) -> int | None:
    """Bytes that further tensors may take on ``device``; None where the system does not tell.

    On CUDA what the allocator holds without using it is free too. Nothing waits for the device.

    Example:
        >>> left = free_bytes(torch.device("cpu"))
        >>> left is None or left > 0
        True
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return 1024 * int(available.split()[1])


def return_unused_memory() -> None:
    """Free what only reference cycles hold, and return the C library's unused pages to the system."""
    gc.collect()
    # A heap that freed tensors have left full of holes keeps its pages, so the next run's come on top of them.
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
