"""Plot a schedule in a terminal or to a file."""

import io
from pathlib import Path

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.files.atomic_write import write_atomic
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.optim.schedule.schedule_shapes import RatePlan

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_KINDS = (".svg", ".png")
Point = tuple[float, float]


def sample_rates(plan: RatePlan, rate: float, points: int) -> list[Point]:
    """Sample the learning rate at evenly spaced steps from the first to the last.

    Args:
        plan: a plan with a total.
        rate: the learning rate at a factor of 1.
        points: at least 2; fewer where the run has fewer steps.

    Returns:
        A list of (steps, samples or tokens before it, learning rate).
    """
    last = int(plan.total) - 1
    places = sorted({round(i * last / (points - 1)) for i in range(points)})
    return [(place, rate * plan.factor(place, place + 1)) for place in places]


def draw_text(points: list[Point], height: int = 10) -> str:
    """Draw a chart with one column per point, with the largest learning rate at its left.

    Args:
        points: learning rates that are not all 0.
        height: number of lines, at least 2.

    Example:
        >>> print(draw_text([(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.75)], height=2))
               1 │  █▄
               0 │ ███
    """
    top = max(rate for _, rate in points)
    labels = [f"{top:.3g}", *[""] * (height - 2), "0"]
    lines = []
    for above, label in enumerate(labels, start=1):
        line = ""
        for _, rate in points:
            # Eighths of this line that the column fills; ``above`` counts lines from the top.
            eighths = round(8 * (height * rate / top - height + above))
            line += _EIGHTHS[min(8, max(0, eighths))]
        lines.append(f"{label:>8} │{line}".rstrip())
    return "\n".join(lines)


def save_picture(points: list[Point], title: str, clock: str, path: str | Path) -> Path:
    """Plot the learning rate as a line and save it.

    Args:
        points: see :func:`sample_rates`.
        title: the title of the plot.
        clock: the unit of the horizontal axis.
        path: path of an SVG or a PNG file.

    Raises:
        ValueError: another file type.
        ModuleNotFoundError: matplotlib is not installed (extra ``plots``).
    """
    kind = Path(path).suffix.lower()
    if kind not in _KINDS:
        raise ValueError(explain(f"{path}", "expected an SVG or PNG file", "Use schedule.svg"))
    require("matplotlib", extra="plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    # Not pyplot, which selects a backend for the whole process and keeps its figures.
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places, rates = zip(*points, strict=True)
    axes.plot(places, rates, color="#3b6ea8", linewidth=1.8)
    axes.fill_between(places, rates, color="#3b6ea8", alpha=0.12, linewidth=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(clock, fontsize=9)
    axes.set_ylabel("learning rate", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind.removeprefix("."), dpi=150)
    return write_atomic(path, drawn.getvalue())
