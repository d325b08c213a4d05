"""Records of memory by category over time, and the files and pictures that show them."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, reduce
from html import escape
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import check_arguments, one_of, require
from lightning_fasttrain.core.messages import UNITS, Report, ReportTable, explain, format_bytes
from lightning_fasttrain.core.safe_load import parse_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
class MemoryRecord(Report):
    """Memory over a few training steps, in six categories that always add up to the total.

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
        now = dict.fromkeys(CATEGORIES, 0)
        changes: list[tuple[float, int, Allocation]] = []
        for allocation in self.allocations:
            if allocation.begin_ms <= 0:
                now[allocation.category] += allocation.nbytes
            else:
                changes.append((allocation.begin_ms, allocation.nbytes, allocation))
            if allocation.end_ms < inf:
                changes.append((allocation.end_ms, -allocation.nbytes, allocation))
        points = [Point(0.0, tuple(now.values()), None)]
        # Ordered by time; at equal times frees come first, so that no peak is invented. Allocations cannot be compared.
        for ms, nbytes, allocation in sorted(changes, key=lambda change: change[:2]):
            now[allocation.category] += nbytes
            points.append(Point(ms, tuple(now.values()), allocation))
        return points

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
            row = asdict(a) | {"end_ms": None if a.end_ms == inf else a.end_ms}  # JSON cannot represent infinity
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

    def list_categories(self) -> Iterator[tuple[str, int, float, int, Holder | None]]:
        """Yield for each category its bytes at the peak, their share, its own peak, and its largest holder."""
        for name, nbytes in self.at_peak.items():
            holders = self.holders(name)
            yield name, nbytes, nbytes / (self.peak_bytes or 1), self.peaks[name], holders[0] if holders else None

    def as_table(self) -> ReportTable:
        title = f"Peak memory {format_bytes(self.peak_bytes)} on {self.device}, {self.where}"
        numbers = dict.fromkeys(("at the peak", "share", "own peak"), "number")
        table = ReportTable(title, {"category": "name", **numbers, "largest holder at the peak": "name"})
        for name, nbytes, share, own_peak, holder in self.list_categories():
            largest = f"{holder.name}  {format_bytes(holder.nbytes)}" if holder is not None else ""
            table.add(name, format_bytes(nbytes), f"{share:.0%}", format_bytes(own_peak), largest)
        return table


COLOURS: dict[str, str] = dict(
    zip(CATEGORIES, ("#3f68a8", "#e3a63d", "#8f7cbf", "#e0775c", "#b3b7bf", "#4f9f78"), strict=True)
)


def memory_page(record: MemoryRecord) -> str:
    """Render the page: a stacked timeline and a table; about four thousand points of the record, including the peak.

    Example:
        >>> page = memory_page(MemoryRecord("cpu", [], end_ms=1.0))
        >>> "0 B at the peak" in page, "http" in page
        (True, False)
    """
    places: dict[tuple[str, ...], int] = {}
    points = []
    for point in record.sample():
        change, place, taken = point.change, ("", "", "", ""), 0
        if change is not None:
            place = change.category, change.name, change.module, change.op
            # The time tells an allocation from a free.
            taken = change.nbytes if change.begin_ms == point.ms else -change.nbytes
        points.append([round(point.ms, 4), *point.nbytes, taken, places.setdefault(place, len(places))])
    data = {
        "categories": CATEGORIES,
        "end": record.end_ms,
        "steps": record.steps_ms,
        "peak": [record.peak.ms, record.peak_bytes],
        "failed": record.failed_ms,
        "places": list(places),
        "points": points,
    }
    colours = [f"--c{i}: {colour};" for i, colour in enumerate(COLOURS.values())]
    rows = []
    for i, (category, nbytes, share, own_peak, holder) in enumerate(record.list_categories()):
        largest = f"<code>{escape(holder.name)}</code> {format_bytes(holder.nbytes)}" if holder is not None else ""
        rows.append(
            f'<tr><td><i style="background: var(--c{i})"></i>{category}</td><td>{format_bytes(nbytes)}</td>'
            f'<td><span class="bar" style="width: {share * 4:.2f}em; background: var(--c{i})"></span>{share:.0%}</td>'
            f"<td>{format_bytes(own_peak)}</td><td>{largest}</td></tr>"
        )
    parts = {
        "colours": " ".join(colours),
        "rows": "\n".join(rows),
        "total": format_bytes(record.peak_bytes),
        # Inserted last, since a name in the data may look like a placeholder.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # prevents tags in the data
    }
    title = f"{format_bytes(record.peak_bytes)} at the peak"
    return fill_page(title, f"on {record.device}, {record.where}", _fill("memory_page.html", parts))


def fill_page(title: str, summary: str, body: str) -> str:
    """Return a page that needs no other file: its title, a line below it, and ``body``, which is HTML."""
    return _fill("page.html", {"title": escape(title), "summary": escape(summary), "body": body})


def _fill(template: str, parts: Mapping[str, str]) -> str:
    text = files("lightning_fasttrain.profiling").joinpath(template).read_text(encoding="utf-8")
    return reduce(lambda text, part: text.replace(f"%{part[0]}%", part[1]), parts.items(), text)


KINDS = ("html", "json", "png", "txt")


@check_arguments
def save_memory_record(
    record: MemoryRecord,
    folder: str | os.PathLike[str],
    kinds: Sequence[str] = ("html", "json"),
    name: str = "memory_timeline",
) -> list[Path]:
    """Write a record to ``folder``, one file per kind; each file is either complete or absent.

    Args:
        record: the record of a :class:`~lightning_fasttrain.profiling.MemoryRecording`.
        folder: created if it is missing.
        kinds: "html", an interactive page without external resources; "json", all data, for
            :meth:`MemoryRecord.from_json`; "png", a picture; "txt", the table.
        name: file name without its suffix.

    Returns:
        The files, in the order of ``kinds``.

    Raises:
        ValueError: a kind is unknown.
        ModuleNotFoundError: "png" without matplotlib, which the extra ``plots`` installs.
        OSError: a file could not be written.

    Example:
        >>> record = MemoryRecord("cpu", [], end_ms=1.0)
        >>> [file.name for file in save_memory_record(record, getfixture("tmp_path"), ["png", "txt"])]
        ['memory_timeline.png', 'memory_timeline.txt']
    """
    check_kinds(kinds)
    content: dict[str, Callable[[], str | Callable[[BinaryIO], object]]] = {
        "html": lambda: memory_page(record),
        "json": record.to_json,
        "png": lambda: lambda file: draw_memory(record).savefig(file, dpi=160),
        "txt": lambda: str(record),
    }
    return [write_atomic(Path(folder) / f"{name}.{kind}", content[kind]()) for kind in kinds]


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse unsupported kinds of files before there is anything to write."""
    for kind in kinds:
        one_of("kind", kind, KINDS)
    if "png" in kinds:
        require("matplotlib", extra="plots")


@check_arguments
def draw_memory(record: MemoryRecord) -> "Figure":
    """Draw the stacked timeline as a matplotlib figure, which is not registered with pyplot.

    Raises:
        ModuleNotFoundError: matplotlib is missing, which the extra ``plots`` installs.

    Example:
        >>> figure = draw_memory(MemoryRecord("cpu", [], end_ms=1.0))
        >>> figure.axes[0].get_xlabel()
        'ms'
    """
    require("matplotlib", extra="plots")
    from matplotlib.figure import Figure

    unit, size = next(((unit, size) for unit, size in UNITS if record.peak_bytes >= size), ("B", 1))
    points = record.sample()
    ms = [*(point.ms for point in points), record.end_ms]
    layers = []
    for i in range(len(COLOURS)):
        layer = [point.nbytes[i] / size for point in points]
        layers.append([*layer, layer[-1]])  # the last value lasts until the end
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.add_subplot()
    # Drawn as steps: memory is constant until it changes.
    axes.stackplot(ms, *layers, labels=COLOURS, colors=list(COLOURS.values()), step="post", linewidth=0)
    peak = record.peak_bytes / size
    top = peak * 1.12  # space above the peak, for the labels
    for i, at in enumerate(record.steps_ms):
        axes.axvline(at, color="lightgray", linewidth=0.8, zorder=0)
        axes.text(at, top, f" step {i + 1}", verticalalignment="top", color="gray")
    axes.plot(record.peak.ms, peak, "o", color="black", markersize=5, clip_on=False)
    side = "right" if record.peak.ms > 0.7 * record.end_ms else "left"
    label = f" peak {format_bytes(record.peak_bytes)} "
    axes.text(record.peak.ms, peak, label, horizontalalignment=side, verticalalignment="bottom", fontweight="bold")
    if record.failed_ms is not None:
        axes.axvline(record.failed_ms, color="black", linestyle=":")
        axes.text(record.failed_ms, peak * 1.06, "out of memory ", horizontalalignment="right")
    axes.set(xlim=(0, record.end_ms or 1), ylim=(0, top or 1), xlabel="ms", ylabel=unit)
    axes.set_title(f"Peak memory on {record.device}, {record.where}", loc="left", fontsize=11, pad=34)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=6, frameon=False)
    return figure
