"""Describe the machine of a measurement: hardware and versions, without paths, host names or user names."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from lightning_fasttrain.core.device import GIB

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
    matrix, times = torch.ones(256, 256, dtype=dtype), []
    for _ in range(3):
        started = time.perf_counter()
        _ = matrix @ matrix
        times.append(time.perf_counter() - started)
    return min(times)


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
