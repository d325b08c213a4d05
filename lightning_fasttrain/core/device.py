"""Free memory of a device, a clock that waits for it, its best speed, and the kind whose kernels run."""

import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from pathlib import Path

import torch

from lightning_fasttrain.core.checks import check_arguments


@check_arguments
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product: the best that a step could reach on this device.

    Measured, in a few hundredths of a second, rather than looked up: the specified peak depends on the clock, the power
    limit and torch's settings for float32.

    Args:
        device: a device with free memory for three matrices of 4096 × 4096; on a CPU of 1024 × 1024.
        dtype: dtype of the matrices.

    Example:
        >>> peak_flops(torch.device("cpu"), torch.float32) > 1e8
        True

    Source:
        Ours.
    """
    # Large enough to keep a device busy, small enough to take a few hundredths of a second.
    side, rounds = (4096, 10) if device.type == "cuda" else (1024, 5)
    # Distinct values, since products of equal values take less power; drawn without advancing the run's generator.
    one = torch.randn(side, side, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    fastest = inf
    for _ in range(rounds):
        began = device_clock(device)
        torch.mm(one, one)
        # The first round also pays for loading kernels.
        fastest = min(fastest, device_clock(device) - began)
    return 2 * side**3 / fastest  # [n, n] @ [n, n]: n³ products and as many sums


def dtype_of(precision: object) -> torch.dtype:
    """Return the dtype in which a Trainer of that precision multiplies matrices.

    Example:
        >>> dtype_of("bf16-mixed"), dtype_of("16-true"), dtype_of("32-true")
        (torch.bfloat16, torch.float16, torch.float32)
    """
    name = str(precision)
    if name.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if name.startswith("16") else torch.float32


GIB = 2**30


_TRACED_AS: ContextVar[str | None] = ContextVar("_TRACED_AS", default=None)


def kernels_of(tensor: torch.Tensor) -> str:
    """Return the type of the device whose kernels compute with ``tensor``: its own, except in :func:`traced_as`.

    Example:
        >>> with traced_as("cuda"):
        ...     kernels_of(torch.zeros(2))
        'cuda'
    """
    return _TRACED_AS.get() or tensor.device.type


@contextmanager
def traced_as(device_type: str) -> Iterator[None]:
    """Let code choose as on another device: for traces of tensors without values, which lie on the CPU."""
    token = _TRACED_AS.set(device_type)
    try:
        yield
    finally:
        _TRACED_AS.reset(token)


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
    """Free what only reference cycles hold, and return unused memory of the allocators to the system and the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # A heap that freed tensors have left full of holes keeps its pages, so the next run's come on top of them.
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)


class AsyncReading:
    """Copy values from a device to the host without waiting, and read them later.

    Args:
        numbers: a tensor on any device.

    Example:
        >>> AsyncReading(torch.tensor([1.0, 2.0])).wait()
        [1.0, 2.0]
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.event = numbers, None
        if numbers.is_cuda:
            # Pinned: otherwise the copy would wait for the device.
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            # An event, so that the host waits only for this copy, not for work that is launched after it.
            self.event = torch.cuda.current_stream(numbers.device).record_event()

    @property
    def is_done(self) -> bool:
        """Whether reading would not wait."""
        return self.event is None or self.event.query()

    def wait(self) -> list[float]:
        """Return the values; wait until the device has computed them."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.tolist()


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
