"""Files of a memory record: an interactive page, the data, a picture and a table."""

import json
import os
from collections.abc import Callable, Sequence
from functools import reduce
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lightning_fasttrain.core.checks import check_arguments, one_of, require
from lightning_fasttrain.core.files import write_atomic
from lightning_fasttrain.core.messages import UNITS, format_bytes
from lightning_fasttrain.profiling.memory_record import CATEGORIES, MemoryRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = dict(zip(CATEGORIES, ("#3f68a8", "#e3a63d", "#8f7cbf", "#e0775c", "#b3b7bf", "#4f9f78"), strict=True))


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
    rows = [_row(record, i, category) for i, category in enumerate(CATEGORIES)]
    parts = {
        "title": escape(f"{format_bytes(record.peak_bytes)} at the peak"),
        "summary": escape(f"on {record.device}, {record.where}"),
        "colours": " ".join(colours),
        "rows": "\n".join(rows),
        "total": format_bytes(record.peak_bytes),
        # Inserted last, since a name in the data may look like a placeholder.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # prevents tags in the data
    }
    page = files("lightning_fasttrain.profiling").joinpath("memory_page.html").read_text(encoding="utf-8")
    return reduce(lambda page, part: page.replace(f"%{part[0]}%", part[1]), parts.items(), page)


def _row(record: MemoryRecord, i: int, category: str) -> str:
    nbytes, holders = record.at_peak[category], record.holders(category)
    share = nbytes / (record.peak_bytes or 1)
    largest = f"<code>{escape(holders[0].name)}</code> {format_bytes(holders[0].nbytes)}" if holders else ""
    return (
        f'<tr><td><i style="background: var(--c{i})"></i>{category}</td><td>{format_bytes(nbytes)}</td>'
        f'<td><span class="bar" style="width: {share * 4:.2f}em; background: var(--c{i})"></span>{share:.0%}</td>'
        f"<td>{format_bytes(record.peaks[category])}</td><td>{largest}</td></tr>"
    )


KINDS = ("html", "json", "png", "txt")
INK, FAINT = "#22252b", "#70757f"


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
    figure = Figure(figsize=(10, 5.2), layout="constrained", facecolor="#fcfcfa")
    axes = figure.add_subplot(facecolor="#fcfcfa")
    # Drawn as steps: memory is constant until it changes.
    axes.stackplot(ms, *layers, labels=COLOURS, colors=list(COLOURS.values()), step="post", linewidth=0)
    peak = record.peak.ms, record.peak_bytes / size
    # 12% of space above the peak, for the labels.
    axes.vlines(record.steps_ms, 0, peak[1] * 1.12, color="#c9c9c2", linewidth=0.8, zorder=0)
    for i, at in enumerate(record.steps_ms):
        axes.annotate(
            f"step {i + 1}", (at, peak[1] * 1.12), (4, -9), textcoords="offset points", fontsize=9, color=FAINT
        )
    axes.plot(*peak, "o", color=INK, markersize=5, markeredgecolor="white", clip_on=False)
    offset, alignment = (-8, "right") if record.peak.ms > 0.7 * record.end_ms else (8, "left")
    axes.annotate(
        f"peak {format_bytes(record.peak_bytes)}",
        peak,
        (offset, 5),
        textcoords="offset points",
        horizontalalignment=alignment,
        fontweight="bold",
        color=INK,
    )
    if record.failed_ms is not None:
        axes.axvline(record.failed_ms, color=INK, linestyle=":")
        axes.annotate("out of memory ", (record.failed_ms, peak[1] * 1.06), horizontalalignment="right", color=INK)
    axes.set(xlim=(0, record.end_ms or 1), ylim=(0, peak[1] * 1.12 or 1), xlabel="ms", ylabel=unit)
    axes.set_title(f"Peak memory on {record.device}, {record.where}", loc="left", fontsize=11, color=INK, pad=34)
    axes.grid(axis="y", color="#e2e2dc", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=FAINT)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=6, frameon=False, handlelength=1, handleheight=1)
    return figure
