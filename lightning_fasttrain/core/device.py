"""A device and its machine: free memory, a clock that waits for it, its best speed, hardware and versions."""

import ctypes
import gc
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from pathlib import Path
from typing import Any

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
    side, rounds = (4096, 10) if device.type == "cuda" else (1024, 3)
    # Distinct values, since products of equal values take less power; drawn without advancing the run's generator.
    one = torch.randn(side, side, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    fastest = inf
    for _ in range(rounds):
        # The first round also pays for loading kernels.
        fastest = min(fastest, time_ms(device, lambda: torch.mm(one, one)) / 1e3)
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


def fast_mixed_precision(device: torch.device) -> str | None:
    """Return Lightning's mixed precision in which a device multiplies faster than in float32; None without one.

    GPUs before Ampere, such as T4 and V100, emulate bfloat16, and have tensor cores for float16. A GPU that this
    machine lacks, as when a plan is made for another one, is assumed to be newer.

    Example:
        >>> fast_mixed_precision(torch.device("cpu")) in ("bf16-mixed", None)
        True
    """
    if device.type == "cpu":
        return "bf16-mixed" if bf16_units() else None
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "16-mixed" if torch.cuda.get_device_capability(device) >= (7, 0) else None


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


def peak_host_bytes() -> int | None:
    """Return the most memory that this process has held on the host so far; None where the system does not report it.

    Example:
        >>> peak = peak_host_bytes()
        >>> peak is None or peak > 2**20
        True
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def return_unused_memory() -> None:
    """Free what only reference cycles hold, and return unused memory of the allocators to the system and the GPU."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    # A heap that freed tensors have left full of holes keeps its pages, so the next run's come on top of them.
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)


_NO_MEMORY_LEFT = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|^MPS backend out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator had no memory left; those of the CPU and of Apple's GPUs raise a ``RuntimeError``.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("no loss"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY_LEFT.search(str(error)) is not None


def has_streams(device: torch.device) -> bool:
    """Return whether copies to and from a device may run beside other work, on streams that one can wait for."""
    return device.type in ("cuda", "xpu")


class AsyncReading:
    """Copy values from a device to the host without waiting, and read them later.

    Args:
        numbers: a tensor on any device. One on an Apple GPU is read where it is, which waits for the device.

    Example:
        >>> AsyncReading(torch.tensor([1.0, 2.0])).wait()
        [1.0, 2.0]
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.event = numbers, None
        if has_streams(numbers.device):
            # Pinned: otherwise the copy would wait for the device.
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            # An event, so that the host waits only for this copy, not for work that is launched after it; on the
            # stream of the copy, which is that of the tensor's device, whichever device is the current one.
            self.event = torch.accelerator.current_stream(numbers.device).record_event()

    @property
    def is_done(self) -> bool:
        """Whether reading would not wait."""
        return self.event is None or self.event.query()

    def wait(self) -> Any:
        """Return the values, as ``tolist`` does; wait until the device has computed them."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.tolist()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if device.type in ("cuda", "xpu", "mps"):
        torch.accelerator.synchronize(device)


def device_clock(device: torch.device) -> float:
    """Return a time in seconds after waiting for ``device`` to finish its queued work; only differences are meaningful.

    Example:
        >>> began = device_clock(torch.device("cpu"))
        >>> device_clock(torch.device("cpu")) >= began
        True
    """
    synchronize(device)
    return time.perf_counter()


def time_ms(device: torch.device, run: Callable[[], object]) -> float:
    """Return the milliseconds that ``run()`` takes on ``device``, which has finished its earlier work before.

    Example:
        >>> time_ms(torch.device("cpu"), lambda: None) >= 0
        True
    """
    began = device_clock(device)
    run()
    return 1e3 * (device_clock(device) - began)


Moment = float | torch.cuda.Event


class DeviceTimer:
    """Adds up the time of several intervals without waiting: on CUDA by events in the stream, else by the host's clock.

    Args:
        device: device whose time is measured.

    Example:
        >>> timer = DeviceTimer(torch.device("cpu"))
        >>> with timer.measure():
        ...     pass
        >>> timer.ms() >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: Moment | None = None
        self._intervals: list[tuple[Moment, Moment]] = []

    def start(self) -> None:
        """Begin an interval."""
        self._began = self.now()

    def stop(self) -> None:
        """End the interval, if one has begun."""
        began, self._began = self._began, None
        if began is not None:
            self._intervals.append((began, self.now()))

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the body of the ``with`` block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def ms(self) -> float:
        """Return the milliseconds so far; on CUDA this waits for the device."""
        return sum(ms_between(began, ended) for began, ended in self._intervals)

    def now(self) -> Moment:
        """Return the moment at which the device arrives here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # The current stream: a step may run on another than the default one.
        event.record(torch.cuda.current_stream(self.device))
        return event


def ms_between(began: Moment, ended: Moment) -> float:
    """Return the milliseconds between two moments of a device; wait until it has arrived at the second."""
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        ended.synchronize()
        return began.elapsed_time(ended)
    assert isinstance(began, float)
    assert isinstance(ended, float)
    return 1e3 * (ended - began)


PACKAGES = ("torch", "lightning", "lightning-fasttrain")


def hardware() -> dict[str, Any]:
    """Processor, its units for bfloat16, cores this process may use, memory in GiB, and the GPU or None.

    Example:
        >>> sorted(hardware())
        ['bf16_units', 'cores', 'cpu', 'gpu', 'gpu_memory_gib', 'ram_gib']
    """
    gpu: dict[str, Any] = {"gpu": None, "gpu_memory_gib": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / GIB, 1)}
    return {
        "cpu": processor_name(),
        "bf16_units": bf16_units(),
        "cores": usable_cores(),
        "ram_gib": _ram_gib(),
        **gpu,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what does the work.

    Example:
        >>> "torch" in versions()
        True
    """
    found = {package: package_version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **{name: v for name, v in found.items() if v}}


def package_version(package: str) -> str | None:
    """The installed version of a package, read from its metadata without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores this process may run on; a container often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no such file outside Linux
    return platform.processor() or platform.machine()


def bf16_units() -> list[str]:
    """The processor's instructions that multiply bfloat16; without any, torch emulates it, up to 100 times slower.

    Example:
        >>> set(bf16_units()) <= {"amx_bf16", "avx512_bf16", "bf16", "sve_bf16"}
        True
    """
    names = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")  # the last two are Arm's
    # torch 2.11 has it under another name, or not at all.
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        found = ask()
        return [name for name in names if found.get(name)]
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [name for name in names if name in flags]


def bf16_slowdown() -> float:
    """Measure how many times as long a matrix product takes in bfloat16 as in float32 on this processor."""
    return _product_s(torch.bfloat16) / _product_s(torch.float32)


def _product_s(dtype: torch.dtype) -> float:
    """Seconds, the fewest of three, for matrices that are large enough to measure and small enough for a slow dtype."""
    matrix = torch.ones(256, 256, dtype=dtype)
    return min(time_ms(matrix.device, lambda: matrix @ matrix) for _ in range(3)) / 1e3


class Neighbours:
    """Number of cores that other processes kept busy while this one worked, which spoils its timings.

    Two threads that wait for each other by spinning, as OpenMP's do, slow down tenfold when a third wants a core.

    Example:
        >>> isinstance(Neighbours().cores(), float | None)
        True
    """

    def __init__(self) -> None:
        self._busy_s, self._ours_s, self._since = _busy_seconds(), _own_seconds(), time.perf_counter()

    def cores(self) -> float | None:
        """The mean since this object was made; None where the system does not report it."""
        busy_s, elapsed_s = _busy_seconds(), time.perf_counter() - self._since
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        ours_s = _own_seconds() - self._ours_s
        return max(0.0, busy_s - self._busy_s - ours_s) / elapsed_s


def _busy_seconds() -> float | None:
    """Processor time that the whole machine has spent on work since it was started."""
    try:
        # The two that are left out are idle time, one of them waiting for a disk.
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _own_seconds() -> float:
    """Processor time of this process and of those it has started that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _ram_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)
    except (AttributeError, ValueError, OSError):
        return None  # Windows
