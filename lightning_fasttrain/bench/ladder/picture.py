"""Draw a ladder: time against peak memory, a dot for each state."""

import itertools
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fasttrain.bench.ladder.report import CLOCKS, describe_baseline, name_machine, name_stacks
from lightning_fasttrain.bench.ladder.results import BASELINES, Climbed, Row, finished_rows
from lightning_fasttrain.core.atomic_write import write_atomic

# Okabe and Ito's colours, which can be told apart without seeing red or green; the shapes differ too.
_BLACK, _ORANGE, _VERMILION, _BLUE = "#000000", "#E69F00", "#D55E00", "#0072B2"
_LOOKS = {"naive": ("s", _BLACK), "strong": ("D", _ORANGE), "compiled": ("D", _VERMILION), "stack": ("o", _BLUE)}
_GREY = "#767676"
_SIDES = ((8, "left"), (-8, "right"), (21, "left"), (-21, "right"))
Dot = tuple[float, float]  # ms per step, MiB
Label = tuple[Dot, str, bool]  # with its text, and whether it is small
# Where a label may stand: its distance from the dot in points, and the side of the text that is nearest to the dot.
_BESIDE = [(9, 0, "left", "center"), (-9, 0, "right", "center"), (0, 10, "center", "bottom"), (0, -10, "center", "top")]
_FURTHER = [(x, y, side, "center") for y in (9, -9, 18, -18, 36, -36, 54, -54, 72) for x, side in _SIDES]


def save_picture(ladder: Climbed, path: str | Path) -> Path | None:
    """Draw time and peak memory of every state, the frontier, the baselines, and the stacks with their factors.

    The labelled states were run in turn; the times of other ones are the products of ratios in the climb.

    Args:
        ladder: what ``ladder.json`` holds.
        path: of the PNG.

    Returns:
        The path; None if matplotlib is not installed (extra ``plots``), or naive failed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ModuleNotFoundError:
        return None
    naive, *above = ladder.rungs
    if naive.error is not None:
        return None
    labelled = list(_labelled_states(ladder))
    names = {row.name for row, _, _ in labelled}
    others = [row for row in finished_rows(naive, above) if row.name not in names]
    # Times of the climb in the unit of those of the last turns.
    scale = labelled[0][0].step_ms / naive.step_ms
    places = [(row.step_ms, row.peak_mib) for row, _, _ in labelled]
    other_places = [(scale * row.step_ms, row.peak_mib) for row in others]
    dots = places + other_places
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    line = {"color": _GREY, "linewidth": 1.2, "label": "frontier", "zorder": 1}
    frontier = find_frontier(dots)
    axes.plot(*zip(*frontier, strict=True), **line)
    ring = {"s": 16, "color": "white", "edgecolors": _GREY, "label": "a state of the climb", "zorder": 2}
    axes.scatter(*zip(*dots, strict=True), **ring)
    for place, (_, look, _) in zip(places, labelled, strict=True):
        marker, colour = _LOOKS[look]
        axes.scatter(*place, s=60, marker=marker, color=colour, edgecolors="white", zorder=3)
    axes.set_xlim(0, 1.12 * max(map(itemgetter(0), dots)))
    axes.set_yscale("log")
    axes.set_ylim(0.6 * min(map(itemgetter(1), dots)), 1.9 * max(map(itemgetter(1), dots)))
    labels = [(place, text, False) for place, (_, _, text) in zip(places, labelled, strict=True)]
    carried = [(place, row.title, True) for place, row in zip(other_places, others, strict=True) if row.carried]
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_xlabel(CLOCKS[ladder.clock].replace("ms/step", "ms per step"))
    axes.set_ylabel("peak memory, MiB")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#eeeeee")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    model = ladder.model
    shape = f"A GPT of {model['layers']} blocks × {model['width']}, vocabulary {model['vocabulary']:,}"
    axes.set_title(f"{shape}, on {name_machine(ladder)}", fontsize=11, loc="left")
    _write_labels(canvas, axes, [*labels, *carried], dots, frontier)
    return write_atomic(path, partial(figure.savefig, format="png", dpi=200))


def find_frontier(dots: list[Dot]) -> list[Dot]:
    """Return the states of which no other has both less time and less memory, the fastest first.

    Example:
        >>> find_frontier([(9, 5), (3, 7), (4, 8), (2, 9)])
        [(2, 9), (3, 7), (9, 5)]
    """
    found: list[Dot] = []
    for ms, mib in sorted(dots):
        if not found or mib < found[-1][1]:
            found.append((ms, mib))
    return found


def _labelled_states(ladder: Climbed) -> Iterator[tuple[Row, str, str]]:
    """Yield naive, the strong baselines and the stacks, each with its look and its label; naive is first."""
    ran = {row.name: row for row in ladder.finals if row.error is None}
    ran.setdefault("naive", ladder.rungs[0])
    for name in BASELINES:
        if name in ran:
            yield ran[name], name, describe_baseline(ran[name])
    for stacks, top in name_stacks(ladder):
        yield (
            ran[top["name"]],
            "stack",
            f"{stacks}\n×{top['speedup']:.2f} as fast as naive, ÷{top['memory_ratio']:.1f} memory",
        )


def _write_labels(canvas: Any, axes: Any, labels: list[Label], dots: list[Dot], line: list[Dot]) -> None:
    """Write each label where it covers no dot, no line and no label; small ones only if that is beside their dot."""
    canvas.draw()  # sizes of texts and axes are known after it
    corners = axes.transData.transform(line)
    on_line = [np.linspace(start, end, 50) for start, end in itertools.pairwise(corners)]
    taken, written = np.concatenate([axes.transData.transform(dots), *on_line]), []
    for dot, text, is_small in labels:
        look, places = {"fontsize": 10, "color": _BLACK, "linespacing": 1.1}, _BESIDE + _FURTHER
        if is_small:
            look, places = {"fontsize": 8, "color": _GREY}, _BESIDE
        for x, y, horizontal, vertical in places:
            label = axes.annotate(text, dot, (x, y), textcoords="offset points", ha=horizontal, va=vertical, **look)
            box = label.get_window_extent(canvas.get_renderer()).padded(3)
            is_inside = axes.bbox.x0 <= box.x0 and box.x1 <= canvas.figure.bbox.x1 and axes.bbox.y0 <= box.y0
            if is_inside and not box.count_contains(taken) and not box.count_overlaps(written):
                written.append(box)
                break
            label.remove()
