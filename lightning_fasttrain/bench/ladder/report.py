"""Show a ladder: lines while it runs, a table in the terminal, a picture in a file."""

import io
import math
import textwrap
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_fasttrain.bench.ladder.results import TIME_WORTH, Climbed, Row, Top, error_of_product
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.messages import FULL_WIDTH

# In the order in which a narrow terminal goes without them, the last one first.
_BY_WEIGHT = (
    *("rung", "ms/step", "peak MiB", "× naive", "÷ naive", "on this device", "max |Δloss|", "exactness"),
    *("÷ strong", "× strong", "loss"),
)
_COLUMNS = (
    *("rung", "ms/step", "× naive", "× strong", "peak MiB", "÷ naive", "÷ strong"),
    *("loss", "max |Δloss|", "exactness", "on this device"),
)
_CLOCKS = {
    "processor": "ms/step: processor time, summed over the cores",
    "device": "ms/step: by events of the GPU",
    "wall": "ms/step: by the clock",
}
_OF_EACH = ("ms/step", "× naive", "peak MiB", "÷ naive", "max |Δloss|")
_BETWEEN_COLUMNS = 3  # a space on both sides, and one of the box
_TEXT = ("rung", "exactness", "on this device")


def as_table(ladder: Climbed, width: int = FULL_WIDTH) -> Table:
    """Return the ladder as a table, compared with both baselines.

    Args:
        ladder: what ``ladder.json`` holds.
        width: columns of the terminal; what does not fit is left out, from the least important column on.
    """
    naive, strong = ladder.rungs[0], ladder.strong or Row()
    rungs = [_cells(row, naive, strong) for row in ladder.rungs]
    rungs += [{"rung": one.title, "on this device": "skipped"} for one in ladder.skipped]
    baselines = [_cells(row, naive, strong) for row in ladder.baselines]
    padded = [_cells(row, ladder.padded[0], Row()) for row in ladder.padded]
    kept = _fitting_columns([*rungs, *baselines, *padded], width)
    model = ladder.model
    title = f"{model['size']} · {model['tokens_per_step']:,} tokens/step · {_name_machine(ladder)}"
    caption = (
        f"(rung): not carried. {_CLOCKS[ladder.clock]}. ×: times as fast, ÷: times less memory, than that baseline."
    )
    if padded:
        caption += " Padded texts are compared with each other."
    if len(kept) < len(_COLUMNS):
        caption += " A wider terminal shows more columns."
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in kept:
        table.add_column(name, justify="left" if name in _TEXT else "right", no_wrap=True)
    for cells in rungs:
        style = "dim" if _is_dim(cells) else None
        table.add_row(*_texts(cells, kept), style=style)
    for section in (baselines, padded):
        table.add_section()
        for cells in section:
            table.add_row(*_texts(cells, kept))
    return table


def _texts(cells: dict[str, str], columns: list[str]) -> list[str]:
    return [_escape(cells.get(name, "")) for name in columns]


def _name_machine(ladder: Climbed) -> str:
    machine = ladder.hardware
    return machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"


def _fitting_columns(rows: list[dict[str, str]], width: int) -> list[str]:
    """Return the columns that fit into so many characters without cutting a word."""
    kept, taken = [], 0
    for name in _BY_WEIGHT:
        taken += max(len(name), *(len(cells.get(name, "")) for cells in rows)) + _BETWEEN_COLUMNS
        if taken > width and kept:
            break
        kept.append(name)
    return [name for name in _COLUMNS if name in kept]


def _is_dim(cells: dict[str, str]) -> bool:
    return cells["rung"].startswith("(") or "ms/step" not in cells


def as_line(row: Row, naive: Row) -> str:
    """Describe a finished rung in one line.

    Example:
        >>> half = Row(title="bf16 mixed", step_ms=50, peak_mib=800, plus_minus=0.02, verdict="Needs less.")
        >>> as_line(half, Row(step_ms=100, peak_mib=800))
        'bf16 mixed                       50.00 ms ×2.00 ±0.04        800.0 MiB ÷1.00   Needs less.'
    """
    if row.error is not None:
        return f"{row.title:<28} failed: {row.error}"
    time = f"{_four_digits(row.step_ms):>9} ms ×{_speed_and_error(naive, row):<11}"
    memory = f"{_four_digits(row.peak_mib):>11} MiB ÷{ratio(naive.peak_mib, row.peak_mib)}"
    return f"{row.title:<28} {time} {memory:<20}  {row.verdict}".rstrip()


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
        # No wrapping: a pipe gets whole lines, a terminal folds them itself.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
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


def _escape(text: str) -> str:
    return text.replace("[", r"\[")  # rich would read it as a style


def ratio(base: float, value: float) -> str:
    """Format how many times smaller ``value`` is than ``base``; a dash where one of them was not measured.

    Example:
        >>> ratio(300.0, 200.0), ratio(300.0, math.nan)
        ('1.50', '–')
    """
    found = base / value  # NaN where either failed
    return "–" if math.isnan(found) else f"{found:.2f}"


def as_table_of_each(ladder: Climbed) -> Table | None:
    """Return a table of each rung alone on top of naive; None if they were not run."""
    pairs = [(row.title, row.alone) for row in ladder.rungs if row.alone is not None]
    if not pairs:
        return None
    table = Table(title="each rung alone, on top of naive")
    table.add_column("rung", no_wrap=True)
    for column in _OF_EACH:
        table.add_column(column, justify="right", no_wrap=True)
    for title, alone in pairs:
        if alone.error is not None:
            table.add_row(title, f"[red]failed[/]: {_escape(alone.error)}")
            continue
        cells = _cells(alone, ladder.rungs[0], Row())
        table.add_row(title, *map(cells.__getitem__, _OF_EACH))
    return table


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
    parts += [f"Skipped: {one.title}: {one.reason}." for one in ladder.skipped]
    return "\n".join(parts)


def _top_in_words(what: str, top: Top | None, ladder: Climbed, noise: float) -> str:
    if top is None:
        return ""
    naive, strong = ladder.rungs[0], ladder.strong
    how = "once more in turn with naive" if top.again else "by the rungs' ratios"
    text = f"{what}, up to “{top.title}”: {_speed(top.speedup, top.plus_minus, noise)}"
    text += f", in {top.memory_ratio:.1f} times less memory"
    text += f" ({_four_digits(top.step_ms)} ms, {how}, {_four_digits(naive.step_ms)} ms)"
    if strong and strong.error is None:
        speedup, memory_ratio = strong.step_ms / top.step_ms, strong.peak_mib / top.peak_mib
        share = math.hypot(strong.plus_minus, top.plus_minus)
        text += f"; against the strong baseline {_speed(speedup, share, noise)}"
        text += f", in {memory_ratio:.1f} times less ({_four_digits(strong.step_ms)} ms)"
    return text + "\n" + textwrap.indent(top.code, "    ")


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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    rows = ladder.rungs
    figure = Figure(figsize=(12, 1.7 + 0.46 * len(rows)), layout="constrained")
    # A canvas of its own, since pyplot keeps figures and may look for a screen.
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, rows, "step_ms", _CLOCKS[ladder.clock].replace("ms/step", "ms per step"), "#3b6ea8", ladder.strong)
    _bars(right, rows, "peak_mib", "peak MiB", "#c4703c", ladder.strong)
    left.set_yticks(range(len(rows)), [row.title for row in rows])
    left.invert_yaxis()  # matplotlib counts from the bottom
    model = ladder.model
    shape = f"{model['size']}: {model['layers']} blocks × {model['width']}"
    figure.suptitle(f"{shape}, {model['tokens_per_step']:,} tokens a step, on {_name_machine(ladder)}", fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return write_atomic(path, picture.getvalue())


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
