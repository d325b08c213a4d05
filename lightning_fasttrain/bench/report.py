"""The ladder for people: a table in the terminal, a picture in a file."""

import io
import platform
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_fasttrain._files import write_atomic
from lightning_fasttrain._messages import FULL_WIDTH

Row = dict[str, Any]

_COLUMNS = (
    *("ms/step", "tokens/s", "× naive", "× strong", "peak MiB", "÷ naive", "÷ strong"),
    *("loss", "max |Δloss|", "exactness", "on this device"),
)
_ONLY_IF_WIDE = ("tokens/s", "× strong", "÷ strong", "loss")


def as_table(ladder: Row, width: int = FULL_WIDTH) -> Table:
    """The ladder as a table, against both baselines.

    Args:
        ladder: what ``ladder.json`` holds.
        width: columns of the terminal; where they are too few, what can be worked out from the rest is left out.
    """
    model, machine = ladder["model"], ladder["hardware"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    whole = width >= FULL_WIDTH
    table = Table(
        title=f"fasttrain ladder · {model['size']} · {model['tokens_per_step']:,} tokens/step · "
        f"{model['attention']} attention · {where}",
        caption="(rung): not carried into the next one. ×: times as fast, ÷: times less memory, than that baseline. "
        f"{_runs(ladder['repeats'])} times within {ladder['noise']['time'] or 0:.0%} are called equal."
        + ("" if whole else " A wider terminal shows more columns."),
    )
    kept = [name for name in _COLUMNS if whole or name not in _ONLY_IF_WIDE]
    table.add_column("rung", no_wrap=whole, overflow="fold")
    for name in kept:
        left = name in ("exactness", "on this device")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    naive, strong = ladder["rungs"][0], ladder["strong"]

    def add(row: Row, title: str, style: str | None = None) -> None:
        cells = _cells(row, naive, strong)
        table.add_row(title, *(cells.get(name, "–") for name in kept), style=style)

    for row in ladder["rungs"]:
        add(row, row["title"] if row["carried"] else f"({row['title']})", None if row["carried"] else "dim")
    for skipped in ladder["skipped"]:
        table.add_row(skipped["title"], *[""] * (len(kept) - 1), f"skipped: {skipped['reason']}", style="dim")
    table.add_section()
    for row in (strong, ladder["bare_loop"]):
        if row is not None:
            add(row, row["title"])
    return table


def _runs(repeats: int) -> str:
    return f"Fastest of {repeats} runs each;" if repeats > 1 else "One run each;"


def _cells(row: Row, naive: Row, strong: Row | None) -> dict[str, str]:
    """The text of each column; those that a failed rung has nothing for are missing."""
    exactness = row["exactness"].replace("_", " ")
    if row["error"] is not None:
        return {"exactness": exactness, "on this device": f"[red]failed[/]: {_plain(row['error'])}"}
    delta = row["max_loss_delta"]
    return {
        "ms/step": f"{row['step_ms']:,.1f}",
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "× naive": ratio(naive, row, "step_ms"),
        "× strong": ratio(strong, row, "step_ms"),
        "peak MiB": f"{row['peak_mib']:,.1f}",
        "÷ naive": ratio(naive, row, "peak_mib"),
        "÷ strong": ratio(strong, row, "peak_mib"),
        "loss": f"{row['loss']:.4f}",
        "max |Δloss|": "–" if delta is None else f"{delta:.1e}",
        "exactness": exactness,
        "on this device": row["verdict"],
    }


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would read it as a style


def ratio(base: Row | None, row: Row, key: str) -> str:
    """How many times smaller ``row[key]`` is than in ``base``, as text; a dash where one of them is missing.

    Example:
        >>> ratio({"step_ms": 300.0, "error": None}, {"step_ms": 200.0, "error": None}, "step_ms")
        '1.50'
    """
    if base is None or base["error"] is not None or row["error"] is not None:
        return "–"
    return f"{base[key] / row[key]:.2f}"


def as_table_of_each(ladder: Row) -> Table | None:
    """Each rung alone on top of naive, or None if they were not run."""
    rows = [row for row in ladder["rungs"] if row.get("alone")]
    if not rows:
        return None
    naive = ladder["rungs"][0]
    table = Table(title="each rung alone, on top of naive")
    table.add_column("rung", no_wrap=True)
    for column in ("ms/step", "× naive", "peak MiB", "÷ naive", "max |Δloss|"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        alone = row["alone"]
        if alone["error"] is not None:
            table.add_row(row["title"], f"[red]failed[/]: {_plain(alone['error'])}")
            continue
        delta = "–" if alone["max_loss_delta"] is None else f"{alone['max_loss_delta']:.1e}"
        cells = (f"{alone['step_ms']:,.1f}", ratio(naive, alone, "step_ms"))
        cells += (f"{alone['peak_mib']:,.1f}", ratio(naive, alone, "peak_mib"), delta)
        table.add_row(row["title"], *cells)
    return table


def summary(ladder: Row) -> str:
    """The result in one sentence."""
    top = ladder["top"]
    if not top or top["speedup"] is None:
        return "No rung could be compared with naive."
    noise = ladder["noise"]["time"]
    text = f"The top against naive: {_speed(top['speedup'], noise)}, in {top['memory_ratio']:.1f} times less memory"
    strong = ladder["strong"]
    if strong and strong["error"] is None:
        speedup, memory_ratio = strong["step_ms"] / top["step_ms"], strong["peak_mib"] / top["peak_mib"]
        text += f"; against the strong baseline: {_speed(speedup, noise)}, in {memory_ratio:.1f} times less"
    disturbed = [
        row["title"] for row in (*ladder["rungs"], strong, ladder["bare_loop"]) if row and row["disturbed_cores"]
    ]
    if disturbed:
        text += (
            f". Other processes were at work during {len(disturbed)} of these runs ({', '.join(disturbed)}): "
            "memory and losses hold, their times do not"
        )
    return f"{text}."


def _speed(speedup: float, noise: float) -> str:
    if abs(1 / speedup - 1) <= noise:
        return f"about as fast (×{speedup:.2f})"
    return f"{speedup:.2f} times as fast" if speedup > 1 else f"slower (×{speedup:.2f})"


def save_picture(ladder: Row, path: str | Path) -> Path | None:
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
    rows = ladder["rungs"]
    figure = Figure(figsize=(12, 1.7 + 0.46 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, rows, "step_ms", "ms per step", "#3b6ea8", ladder["strong"])
    _bars(right, rows, "peak_mib", "peak MiB", "#c4703c", ladder["strong"])
    left.set_yticks(range(len(rows)), [row["title"] for row in rows])
    left.invert_yaxis()
    model, machine = ladder["model"], ladder["hardware"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(
        f"{model['size']}: {model['layers']} blocks × {model['width']}, {model['tokens_per_step']:,} tokens a step, "
        f"on {where or platform.machine()}",
        fontsize=11,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return write_atomic(path, picture.getvalue())


def _bars(axes: Any, rows: list[Row], key: str, label: str, colour: str, strong: Row | None) -> None:
    values = [row[key] or 0.0 for row in rows]
    largest = max(values) or 1.0
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        kept = row["carried"]
        axes.barh(
            place,
            value,
            height=0.68,
            color=colour if kept else "#e4e4e4",
            edgecolor="white" if kept else "#9a9a9a",
            hatch=None if kept else "///",
            linewidth=0.8,
        )
        text = "failed" if row["error"] is not None else f"{value:,.0f}"
        if row["error"] is None and not kept and key == "step_ms":
            text += "  not carried"
        over_line = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        colour_of_text = "#222" if kept else "#777"
        axes.text(value + 0.01 * largest, place, text, va="center", fontsize=9, color=colour_of_text, bbox=over_line)
    if strong and strong["error"] is None:
        bottom, inside = len(rows) - 0.35, strong[key] > 0.6 * largest
        axes.plot([strong[key]] * 2, [-0.5, bottom], color="#444", linewidth=1, linestyle=(0, (4, 3)))
        label_at = {"ha": "right" if inside else "left", "va": "center", "fontsize": 8, "color": "#444"}
        axes.text(strong[key], bottom, "strong baseline  " if inside else "  strong baseline", **label_at)
    axes.set_title(label, fontsize=10, loc="left")
    axes.set_xlim(0, largest * 1.22)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#bbb")
