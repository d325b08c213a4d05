"""Memory over a few training steps: every allocation, and sums by category."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from io import StringIO
from math import inf
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lightning_fasttrain.core.files import parse_json
from lightning_fasttrain.core.messages import explain, format_bytes

CATEGORIES: tuple[str, ...] = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "inputs")
_LARGEST = 2**30  # bytes of a record as JSON


@dataclass(slots=True)
class Allocation:
    """One allocation, from when it was made to when it was freed.

    Attributes:
        begin_ms: time since the recording began; 0.0 for memory that existed before.
        end_ms: infinite for memory that was never freed.
        category: one of :data:`CATEGORIES`.
        name: the parameter that it belongs to, or whose gradient or state it is; else empty.
        module: qualified name of the innermost module at work; of the optimizer's ``step``; or empty.
        op: the operator that the module called, or the autograd node of the backward pass; or empty.
    """

    nbytes: int
    begin_ms: float
    end_ms: float = inf
    category: str = "temporaries"
    name: str = ""
    module: str = ""
    op: str = ""

    @property
    def holder(self) -> str:
        return self.name or self.module or self.op or "(elsewhere)"


class Point(NamedTuple):
    """A time at which memory changed: the bytes of each category after it, and what was allocated or freed."""

    ms: float
    nbytes: tuple[int, ...]
    change: Allocation | None

    @property
    def total(self) -> int:
        return sum(self.nbytes)


class Holder(NamedTuple):
    """A parameter or a module that holds memory at one time, and in which category."""

    category: str
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} {self.category} of {self.name}"


@dataclass
class MemoryRecord:
    """Memory over a few training steps, in six categories that always add up to the total.

    It prints as a table, with rich too.

    Attributes:
        device: device of the memory.
        allocations: all allocations, in the order in which they began.
        steps_ms: start of each step.
        end_ms: end of the recording.
        failed_ms: time at which memory ran out, if it did.

    Example:
        >>> weight, product = Allocation(4096, 0.0, category="parameters"), Allocation(8192, 1.0, 2.0, op="aten::mm")
        >>> record = MemoryRecord("cpu", [weight, product], steps_ms=[0.0], end_ms=3.0)
        >>> record.peak_bytes, record.climb.op, record.at_peak["parameters"]
        (12288, 'aten::mm', 4096)
        >>> MemoryRecord.from_json(record.to_json()) == record
        True

    Source:
        Ours.
    """

    device: str
    allocations: list[Allocation]
    steps_ms: list[float] = field(default_factory=list)
    end_ms: float = 0.0
    failed_ms: float | None = None

    @cached_property
    def points(self) -> list[Point]:
        """Memory after each change; the first point is the memory that existed before."""
        return list(self._points())

    def _points(self) -> Iterator[Point]:
        now = dict.fromkeys(CATEGORIES, 0)
        changes: list[tuple[float, int, Allocation]] = []
        for allocation in self.allocations:
            if allocation.begin_ms <= 0:
                now[allocation.category] += allocation.nbytes
            else:
                changes.append((allocation.begin_ms, allocation.nbytes, allocation))
            if allocation.end_ms < inf:
                changes.append((allocation.end_ms, -allocation.nbytes, allocation))
        yield Point(0.0, tuple(now.values()), None)
        # Ordered by time; at equal times frees come first, so that no peak is invented. Allocations cannot be compared.
        for ms, nbytes, allocation in sorted(changes, key=lambda change: change[:2]):
            now[allocation.category] += nbytes
            yield Point(ms, tuple(now.values()), allocation)

    @cached_property
    def peak(self) -> Point:
        """The first time at which memory use was largest."""
        return max(self.points, key=lambda point: point.total)

    @cached_property
    def climb(self) -> Allocation | None:
        """The allocation that brought memory to within 1% of the peak; None if it was there at the start."""
        i = self.points.index(self.peak)
        while i > 0 and self.points[i - 1].total >= 0.99 * self.peak_bytes:
            i -= 1
        return self.points[i].change

    @property
    def peak_bytes(self) -> int:
        return self.peak.total

    @property
    def at_peak(self) -> dict[str, int]:
        """Category → bytes at the peak; they add up to ``peak_bytes``."""
        return dict(zip(CATEGORIES, self.peak.nbytes, strict=True))

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Category → its largest bytes, each at its own time."""
        most = dict.fromkeys(CATEGORIES, 0)
        for point in self.points:
            for name, nbytes in zip(CATEGORIES, point.nbytes, strict=True):
                most[name] = max(most[name], nbytes)
        return most

    def holders(self, category: str | None = None, ms: float | None = None) -> list[Holder]:
        """List who holds memory, in one category or in all, at a time or at the peak; the largest first."""
        if ms is None:
            ms = self.peak.ms
        held: Counter[tuple[str, str]] = Counter()
        for a in self.allocations:
            if a.begin_ms <= ms < a.end_ms and category in (None, a.category):
                held[a.category, a.holder] += a.nbytes
        return [Holder(*key, nbytes) for key, nbytes in held.most_common()]

    def sample(self, most: int = 4000) -> list[Point]:
        """Return about ``most`` points: the highest and last of each equal time interval; the peak is kept."""
        # Two points are kept per interval; 1.0 if the record has no duration.
        stretch_ms = self.end_ms / (most // 2) or 1.0
        highest: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, point in enumerate(self.points):
            stretch = int(point.ms / stretch_ms)
            last[stretch] = i
            if point.total > self.points[highest.setdefault(stretch, i)].total:
                highest[stretch] = i
        return [self.points[i] for i in sorted({*highest.values(), *last.values()})]

    def to_json(self) -> str:
        """Serialize the record to JSON; ``allocations`` are rows under the names in ``columns``."""
        columns = [column.name for column in fields(Allocation)]
        rows = []
        for a in self.allocations:
            row = {column: getattr(a, column) for column in columns}
            row["end_ms"] = None if a.end_ms == inf else a.end_ms  # JSON cannot represent infinity
            rows.append(list(row.values()))
        sums = {"peak_bytes": self.peak_bytes, "at_peak": self.at_peak, "peaks": self.peaks}
        climb = None if self.climb is None else {"module": self.climb.module, "op": self.climb.op}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "allocations"}
        return json.dumps(
            {**own, **sums, "peak_ms": self.peak.ms, "climb": climb, "columns": columns, "allocations": rows}
        )

    @classmethod
    def from_json(cls, text: str) -> "MemoryRecord":
        """Load the record that :meth:`to_json` wrote.

        Raises:
            ValueError: it is not such a record.
        """
        data = parse_json(text, "the memory record", _LARGEST)
        try:
            allocations = [Allocation(*row) for row in data["allocations"]]
            own = {f.name: data[f.name] for f in fields(cls) if f.name != "allocations"}
        except (LookupError, TypeError) as error:
            why = f"MemoryRecord.to_json did not write it ({type(error).__name__}: {error})"
            raise ValueError(explain("the memory record cannot be read", why, "Record it again")) from error
        for allocation in allocations:
            if allocation.end_ms is None:
                allocation.end_ms = inf
        return cls(allocations=allocations, **own)

    @property
    def where(self) -> str:
        """The time of the peak, and the operator and module that caused it."""
        if self.climb is None:
            return f"at {self.peak.ms:.1f} ms, from memory that existed at the start"
        module = f" of {self.climb.module}" if self.climb.module else ""
        return f"at {self.peak.ms:.1f} ms, in {self.climb.op or 'Python'}{module}"

    def __rich__(self) -> Table:
        table = Table(
            title=f"Peak memory {format_bytes(self.peak_bytes)} on {self.device}, {self.where}",
            title_justify="left",
            title_style="bold",
        )
        table.add_column("category")
        for heading in ("at the peak", "share", "own peak"):
            table.add_column(heading, justify="right")
        table.add_column("largest holder at the peak")
        for name, nbytes in self.at_peak.items():
            share, holders = nbytes / (self.peak_bytes or 1), self.holders(name)
            largest = f"{holders[0].name}  {format_bytes(holders[0].nbytes)}" if holders else ""
            table.add_row(name, format_bytes(nbytes), f"{share:.0%}", format_bytes(self.peaks[name]), largest)
        return table

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue()
