"""Show a ladder: lines while it runs, a table in the terminal, a picture in a file."""

import math
import textwrap
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_fasttrain.bench.ladder.results import TIME_WORTH, Climbed, Row, error_of_product
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.messages import ReportTable, wrap

# Heading → kind of the column; a narrow terminal has the last ones below their row.
_COLUMNS = {
    "rung": "name",
    **dict.fromkeys(("ms/step", "× naive", "peak MiB", "÷ naive", "max |Δloss|"), "number"),
    "exactness": "name",
    **dict.fromkeys(("× strong", "÷ strong", "loss"), "number"),
    "on this device": "prose",
}
_CLOCKS = {
    "processor": "ms/step: processor time, summed over the cores",
    "device": "ms/step: by events of the GPU",
    "wall": "ms/step: by the clock",
}
_OF_EACH = ("rung", "ms/step", "× naive", "peak MiB", "÷ naive", "max |Δloss|", "on this device")


def as_table(ladder: Climbed) -> ReportTable:
    """Return the ladder as a table, compared with both baselines.

    Args:
        ladder: what ``ladder.json`` holds.
    """
    naive, strong = ladder.rungs[0], ladder.strong or Row()
    model = ladder.model
    title = f"{model['size']} · {model['tokens_per_step']:,} tokens/step · {_name_machine(ladder)}"
    notes = [
        f"(rung): not carried. {_CLOCKS[ladder.clock]}. ×: times as fast, ÷: times less memory, than that baseline."
    ]
    if ladder.padded:
        notes.append("Padded texts are compared with each other.")
    table = ReportTable(title, _COLUMNS, notes)
    for row in ladder.rungs:
        _add(table, _cells(row, naive, strong))
    for one in ladder.skipped:
        _add(table, {"rung": one["title"], "on this device": "skipped"})
    padded = next(iter(ladder.padded), naive)
    for rows, base, other in ((ladder.baselines, naive, strong), (ladder.padded, padded, Row())):
        if rows:
            table.add_section()
        for row in rows:
            _add(table, _cells(row, base, other))
    return table


def as_table_of_each(ladder: Climbed) -> ReportTable | None:
    """Return a table of each rung alone on top of naive; None if they were not run."""
    table = ReportTable("each rung alone, on top of naive", {name: _COLUMNS[name] for name in _OF_EACH})
    for row in ladder.rungs:
        if row.alone is not None:
            cells = _cells(row.alone, ladder.rungs[0], Row())
            _add(table, {**cells, "rung": row.title, "on this device": row.alone.error or ""})
    return table if table.rows else None


def _add(table: ReportTable, cells: Mapping[str, str]) -> None:
    style = "dim" if cells["rung"].startswith("(") or "ms/step" not in cells else ""
    table.add(*(cells.get(name, "") for name in table.headings), style=style)


def _name_machine(ladder: Climbed) -> str:
    machine = ladder.hardware
    return machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"


def as_line(row: Row, naive: Row) -> str:
    """Describe a finished rung in one line.

    Example:
        >>> half = Row(title="bf16 mixed", step_ms=50, peak_mib=800, plus_minus=0.02, verdict="Needs less.")
        >>> as_line(half, Row(step_ms=100, peak_mib=800))
        'bf16 mixed: 50.00 ms (×2.00 ±0.04), 800.0 MiB (÷1.00). Needs less.'
    """
    if row.error is not None:
        return f"{row.title}: failed: {row.error}"
    time = f"{_four_digits(row.step_ms)} ms (×{_speed_and_error(naive, row)})"
    memory = f"{_four_digits(row.peak_mib)} MiB (÷{ratio(naive.peak_mib, row.peak_mib)})"
    return f"{row.title}: {time}, {memory}. {row.verdict}".rstrip()


class Live:
    """Shows the running rung, and a line for each finished one; only these lines if the output is not a terminal.

    Args:
        console: where to.
        rows: number of rungs and baselines.
    """

    def __init__(self, console: Console, rows: int) -> None:
        columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._task = self._bar.add_task("", total=rows)
        self._naive: Row | None = None

    def __enter__(self) -> "Live":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def progress(self, title: str, message: Mapping[str, object]) -> None:
        """Show a message of a worker, or of the ladder, whose phases are ``"start"`` and ``"turn"``."""
        if message["phase"] != "timed":  # a turn of which is named already
            self._bar.update(self._task, description=f"{title}: {message['phase']} {message.get('step', '')}")

    def row(self, row: Row) -> None:
        """Print the line of a finished rung, and its notes."""
        self._bar.advance(self._task)
        if row.name == "naive" or (row.name == "padded" and self._naive):
            self._naive = row
        self._say(as_line(row, self._naive or row))
        notes = list(row.notes)
        if row.disturbed_cores:
            notes.append(f"other processes kept up to {row.disturbed_cores:.1f} cores busy")
        for note in notes:
            self._say(f"    {note}")

    def _say(self, line: str) -> None:
        for part in wrap(line, self._console.width, hanging="    "):
            self._console.print(part, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def _cells(row: Row, naive: Row, strong: Row) -> dict[str, str]:
    """Return column → text; columns for which a failed rung has no value are missing."""
    in_chain = row.carried or row.host == "bare" or row.name in ("strong", "padded", "trimmed")
    cells = {
        "rung": row.title if in_chain else f"({row.title})",
        "exactness": row.exactness.value.replace("_", " "),
        "on this device": row.verdict,
    }
    if row.error is not None:
        return {**cells, "ms/step": "failed"}
    delta = row.max_loss_delta
    return {
        **cells,
        "ms/step": _four_digits(row.step_ms),
        "× naive": _speed_and_error(naive, row),
        "× strong": _speed_and_error(strong, row),
        "peak MiB": _four_digits(row.peak_mib),
        "÷ naive": ratio(naive.peak_mib, row.peak_mib),
        "÷ strong": ratio(strong.peak_mib, row.peak_mib),
        "loss": f"{row.loss:.4f}",
        "max |Δloss|": "–" if delta is None else f"{delta:.1e}",
    }


def _speed_and_error(base: Row, row: Row) -> str:
    """Format how many times as fast a row is as ``base``, with the half-width of the interval of 95%."""
    speed = ratio(base.step_ms, row.step_ms)
    error = error_of_product(base, row)
    if base is row or not error or speed == "–":
        return speed
    return f"{speed} ±{base.step_ms / row.step_ms * error:.2f}"


def _four_digits(number: float) -> str:
    """Format so that quotients of printed numbers are those of the measured ones, also of very short steps."""
    decimals = sum(number < limit for limit in (10, 100, 1000))
    return f"{number:,.{decimals}f}"


def ratio(base: float, value: float) -> str:
    """Format how many times smaller ``value`` is than ``base``; a dash where one of them was not measured.

    Example:
        >>> ratio(300.0, 200.0), ratio(300.0, math.nan)
        ('1.50', '–')
    """
    found = base / value  # NaN where either failed
    return "–" if math.isnan(found) else f"{found:.2f}"


def summary(ladder: Climbed) -> str:
    """Describe the two best rungs, each with its code, and the failures and disturbances of this run."""
    tops, noise = ladder.tops, ladder.noise["time"] or 0.0
    parts = [
        _top_in_words("Fastest with half of naive's memory", tops["fastest"], ladder, noise),
        _top_in_words("Leanest within 1.5 times naive's time", tops["leanest"], ladder, noise),
    ]
    parts = list(filter(None, parts)) or ["No rung takes half of naive's memory."]
    if ladder.noise["time"]:
        parts.append(f"A rung's time is known to ±{noise:.0%} of that of the rung below, in the median.")
    rows = (*ladder.rungs, *ladder.baselines, *ladder.padded)
    disturbed = [row.title for row in rows if row.disturbed_cores]
    if disturbed:
        parts.append(
            f"Other processes were at work during {len(disturbed)} of these runs ({', '.join(disturbed)}): their "
            "intervals are wider for it."
        )
    parts += [f"Failed: {row.title}: {row.error.rstrip('.')}." for row in rows if row.error is not None]
    parts += [f"Skipped: {one['title']}: {one['reason']}." for one in ladder.skipped]
    return "\n".join(parts)


def _top_in_words(what: str, top: dict[str, Any] | None, ladder: Climbed, noise: float) -> str:
    if top is None:
        return ""
    naive, strong = ladder.rungs[0], ladder.strong
    how = "once more in turn with naive" if top["again"] else "by the rungs' ratios"
    text = f"{what}, up to “{top['title']}”: {_speed(top['speedup'], top['plus_minus'], noise)}"
    text += f", in {top['memory_ratio']:.1f} times less memory"
    text += f" ({_four_digits(top['step_ms'])} ms, {how}, {_four_digits(naive.step_ms)} ms)"
    if strong and strong.error is None:
        speedup, memory_ratio = strong.step_ms / top["step_ms"], strong.peak_mib / top["peak_mib"]
        share = math.hypot(strong.plus_minus, top["plus_minus"])
        text += f"; against the strong baseline {_speed(speedup, share, noise)}"
        text += f", in {memory_ratio:.1f} times less ({_four_digits(strong.step_ms)} ms)"
    return text + "\n" + textwrap.indent(top["code"], "    ")


def _speed(speedup: float, share: float, noise: float) -> str:
    """Describe a speedup whose interval is ``share`` of it, or, where that is unknown, ``noise``."""
    factor = f"{speedup:.2f}"
    if share:
        factor += f" ±{speedup * share:.2f}"
    if abs(1 / speedup - 1) <= max(TIME_WORTH, share or noise):
        return f"about as fast (×{factor})"
    if speedup > 1:
        return f"{factor} times as fast"
    return f"slower (×{factor})"


def save_picture(ladder: Climbed, path: str | Path) -> Path | None:
    """Draw ms/step and peak MiB of every rung as bars, naive on top.

    Args:
        ladder: what ``ladder.json`` holds.
        path: of the PNG.

    Returns:
        The path, or None if matplotlib is not installed (extra ``plots``).
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    rows = ladder.rungs
    figure = Figure(figsize=(12, 1.7 + 0.46 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, rows, "step_ms", _CLOCKS[ladder.clock].replace("ms/step", "ms per step"), "#3b6ea8", ladder.strong)
    _bars(right, rows, "peak_mib", "peak MiB", "#c4703c", ladder.strong)
    left.set_yticks(range(len(rows)), [row.title for row in rows])
    left.invert_yaxis()  # matplotlib counts from the bottom
    model = ladder.model
    shape = f"{model['size']}: {model['layers']} blocks × {model['width']}"
    figure.suptitle(f"{shape}, {model['tokens_per_step']:,} tokens a step, on {_name_machine(ladder)}", fontsize=11)
    return write_atomic(path, partial(figure.savefig, format="png", dpi=150))


def _beside_bar(row: Row, key: str) -> str:
    if row.error is not None:
        return "failed"
    text = f"{getattr(row, key):,.0f}"
    if not row.carried and key == "step_ms":  # said once for both bars
        text += "  not carried"
    return text


def _bars(axes: object, rows: list[Row], key: str, label: str, colour: str, strong: Row | None) -> None:
    measured = map(attrgetter(key), rows)
    values = np.nan_to_num(list(measured))  # no bar for a rung that failed
    largest = max(values) or 1.0
    carried, over_line = {"color": colour, "edgecolor": "white"}, {"facecolor": "white", "edgecolor": "none", "pad": 1}
    not_carried = {"color": "#e4e4e4", "edgecolor": "#9a9a9a", "hatch": "///"}
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        look, text_colour = not_carried, "#777"
        if row.carried:
            look, text_colour = carried, "#222"
        axes.barh(place, value, height=0.68, linewidth=0.8, **look)
        text_look = {"fontsize": 9, "color": text_colour, "bbox": over_line}
        axes.text(value + 0.01 * largest, place, _beside_bar(row, key), va="center", **text_look)
    if strong and strong.error is None:
        at = getattr(strong, key)
        bottom, text, side = len(rows) - 0.35, "  strong baseline", "left"
        if at > 0.6 * largest:
            text, side = "strong baseline  ", "right"
        axes.plot([at] * 2, [-0.5, bottom], color="#444", linewidth=1, linestyle=(0, (4, 3)))
        axes.text(at, bottom, text, ha=side, va="center", fontsize=8, color="#444")
    axes.set_title(label, fontsize=10, loc="left")
    axes.set_xlim(0, largest * 1.22)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#bbb")
