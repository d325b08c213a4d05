"""Report of the peak memory of a training step, for users and for programs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_fasttrain.core.messages import Report, ReportTable, format_bytes, number_of
from lightning_fasttrain.memory.allocation_trace import Allocation
from lightning_fasttrain.profiling.memory_record import CATEGORIES

LARGEST = 10  # holders that are listed
_STATES = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class Holder:
    """Memory held at the peak by one module, or by the same module of every block.

    Args:
        module: qualified name of a module or parameter, with indices as ``*``; "" outside of all modules.
        category: one of the six categories.
        op: the operation that allocated it; "" for memory that existed before the step.
        count: number of tensors.
        nbytes: their total size.
    """

    module: str
    category: str
    op: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class MemoryReport(Report):
    """The memory of one training step, in bytes.

    Args:
        peak_bytes: the peak; if values that a prediction does not have decide shapes, its upper bound.
        least_bytes: its lower bound; the same as ``peak_bytes`` if values decide nothing.
        reserved_bytes: bytes that CUDA's caching allocator holds, with what is fragmented; the peak on the CPU.
        at_peak: category → bytes at the peak; they add up to ``peak_bytes``.
        peaks: category → its own peak in the step.
        phase: phase of the peak: ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"optimizer step"``.
        module: qualified name of the running module at the peak; "" outside of all modules.
        op: the operation that reaches the peak.
        holders: the largest holders at the peak, largest first.
        device: the predicted device.
        precision: as given.
        notes: assumptions and omissions.
        host_bytes: peak of what the strategy keeps in host memory, for this rank.
        nvme_bytes: bytes that it keeps on disk, for this rank.
    """

    peak_bytes: int
    least_bytes: int
    reserved_bytes: int
    at_peak: dict[str, int]
    peaks: dict[str, int]
    phase: str
    module: str
    op: str
    holders: tuple[Holder, ...]
    device: str
    precision: str
    notes: tuple[str, ...] = ()
    host_bytes: int = 0
    nvme_bytes: int = 0

    def as_table(self) -> ReportTable:
        """Build the table with the categories and the largest holders."""
        where = f"{self.phase} of {self.module}" if self.module else self.phase
        peak = f"Peak {self._format_peak()} on {self.device}, {self.precision}"
        columns = {"": "name", "at the peak": "number", "at most": "number"}
        table = ReportTable(f"{peak}, in the {where}: {self.op}", columns, self.notes)
        for category in CATEGORIES:
            table.add(category, format_bytes(self.at_peak[category]), format_bytes(self.peaks[category]))
        for place, nbytes in (("host memory", self.host_bytes), ("disk", self.nvme_bytes)):
            if nbytes:
                table.add(f"offloaded to {place}", "", format_bytes(nbytes))
        table.add_section()
        for holder in self.holders:
            several = f"{holder.count} × " if holder.count > 1 else ""
            made = f"{several}{holder.op}" if holder.op else number_of(holder.count, "tensor")
            name = f"{holder.module or 'outside of modules'}: {holder.category}, {made}"
            table.add(name, format_bytes(holder.nbytes), "")
        return table

    def _format_peak(self) -> str:
        most = format_bytes(self.peak_bytes)
        if self.least_bytes < self.peak_bytes:
            return f"{format_bytes(self.least_bytes)} to {most}"
        return most


def report(
    allocations: Sequence[Allocation], since: int, reserved_bytes: int | None = None, **about: Any
) -> MemoryReport:
    """Find the peak among ``allocations`` from the time ``since`` on.

    Args:
        allocations: allocations of a finished trace.
        since: a time of that trace; memory that existed then counts from the beginning.
        reserved_bytes: as in the report; by default the peak.
        about: ``device``, ``precision`` and ``notes`` of the report.
    """
    counted, changes = _list_changes(allocations, since)
    now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    peaks = dict(now)
    total, peak_bytes, peak = 0, -1, (since, counted[0])
    for time, change, allocation in changes:
        category = allocation.category
        now[category] += change
        total += change
        peaks[category] = max(peaks[category], now[category])
        if total > peak_bytes:
            peak_bytes, peak = total, (time, allocation)
    time, last = peak
    held = [a for a in counted if a.born <= time < a.died]
    at_peak = dict.fromkeys(CATEGORIES, 0)
    for allocation in held:
        at_peak[allocation.category] += allocation.nbytes
    if reserved_bytes is None:
        reserved_bytes = peak_bytes
    return MemoryReport(
        peak_bytes=peak_bytes,
        least_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        at_peak=at_peak,
        peaks=peaks,
        phase=last.phase,
        module=last.module,
        op=last.op,
        holders=_find_largest(held),
        **about,
    )


def _list_changes(
    allocations: Sequence[Allocation], since: int
) -> tuple[list[Allocation], list[tuple[int, int, Allocation]]]:
    """Return the allocations that exist from ``since`` on, and the times at which memory changes, with the bytes."""
    counted, births, deaths = [], [], []
    for allocation in allocations:
        if allocation.died > since:
            counted.append(allocation)
            births.append((max(allocation.born, since), allocation.nbytes, allocation))
            deaths.append((allocation.died, -allocation.nbytes, allocation))
    # Times differ, except at `since`; sorting is stable, so memory that existed then is counted first.
    return counted, sorted(births + deaths, key=lambda event: event[0])


class Moment(NamedTuple):
    """A moment of a step: its phase, the running module, and the operation that begins."""

    phase: str
    module: str
    op: str


def find_moments(allocations: Sequence[Allocation], since: int) -> dict[Moment, tuple[int, int]]:
    """Return the most bytes at each moment from the time ``since`` on, and those of states among them."""
    moments: dict[Moment, tuple[int, int]] = {}
    total = states = 0
    for _, change, allocation in _list_changes(allocations, since)[1]:
        total += change
        states += change if allocation.category in _STATES else 0
        if change > 0:
            moment = Moment(allocation.phase, allocation.module, allocation.op)
            moments[moment] = max((total, states), moments.get(moment, (0, 0)))
    return moments


def peak_of(allocations: Sequence[Allocation], since: int) -> int:
    """Return the peak bytes of ``allocations`` from the time ``since`` on; 0 for none."""
    if not any(allocation.died > since for allocation in allocations):
        return 0
    return report(allocations, since, device="", precision="").peak_bytes


def join_range(reports: Sequence[MemoryReport], note: str) -> MemoryReport:
    """Return the report with the highest peak, with the lowest one as its lower bound; ``note`` if they differ."""
    least, *_, most = sorted(reports, key=lambda report: report.peak_bytes)
    if least.peak_bytes == most.peak_bytes:
        return most
    return replace(most, least_bytes=least.peak_bytes, notes=(*most.notes, note))


def _find_largest(held: Sequence[Allocation]) -> tuple[Holder, ...]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for allocation in held:
        module = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", allocation.module)
        # Parameters, gradients and states are merged, whichever operation allocated them.
        op = allocation.op if allocation.category in ("activations", "temporaries") else ""
        groups.setdefault((module, allocation.category, op), []).append(allocation.nbytes)
    holders = [Holder(*key, count=len(sizes), nbytes=sum(sizes)) for key, sizes in groups.items()]
    return tuple(sorted(holders, key=lambda holder: -holder.nbytes)[:LARGEST])
