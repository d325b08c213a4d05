"""Free memory of a device, and a clock that waits for it."""

import ctypes
import gc
import sys
import time
from pathlib import Path

import torch

GIB = 2**30


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that further tensors may take on ``device``; None where the system does not report them.

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


def device_clock(device: torch.device) -> float:
    """Return a time in seconds after waiting for ``device`` to finish its queued work; only differences are meaningful.

    Example:
        >>> began = device_clock(torch.device("cpu"))
        >>> device_clock(torch.device("cpu")) >= began
        True
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
