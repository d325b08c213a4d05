"""Schedules as closed forms, and the request that one is made from."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.checks import one_of, require
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.technique.duration import Length, read_length

_START_OF_CYCLE = 1 / 25  # torch's ``div_factor``


@dataclass(frozen=True)
class RatePlan:
    """A learning rate schedule over a run, in units of one clock.

    Attributes:
        shape: the name of the shape.
        clock: the unit: ``"steps"``, ``"samples"`` or ``"tokens"``.
        warmup: the end of the warmup; 0 for none.
        total: the end of the run.
        final: the factor at the end.
        marks: for ``step``: when the learning rate falls.
        by: for ``step``: the factor at each mark.
        decay: for ``wsd``: the duration of the decay at the end.
    """

    shape: str
    clock: str = "steps"
    warmup: float = 0.0
    total: float = math.inf
    final: float = 0.0
    marks: tuple[float, ...] = ()
    by: float = 0.1
    decay: float = 0.0

    def factor(self, before: float, after: float) -> float:
        """Return the factor of the learning rate in a step, from the counts before and after it.

        Example:
            >>> plan = RatePlan("linear", warmup=2, total=6)
            >>> [plan.factor(k, k + 1) for k in range(6)]
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if self.shape != "one-cycle" and before < self.warmup:
            return min(1.0, after / self.warmup)
        return SHAPES[self.shape](self, before, after)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {**asdict(self), "marks": list(self.marks)}


Shape = Callable[[RatePlan, float, float], float]


def _share(now: float, start: float, end: float) -> float:
    """Return the completed share of an interval, from 0 to 1."""
    # A warmup as long as the run leaves an empty interval, which is over.
    if end <= start:
        return 1.0
    return min(1.0, max(0.0, now - start) / (end - start))


def _fall(share: float, to: float) -> float:
    """Decay from 1 along half a cosine."""
    return to + (1 - to) * (1 + math.cos(math.pi * share)) / 2


def _constant(plan: RatePlan, before: float, after: float) -> float:
    return 1.0


def _linear(plan: RatePlan, before: float, after: float) -> float:
    return 1 - (1 - plan.final) * _share(before, plan.warmup, plan.total)


def _cosine(plan: RatePlan, before: float, after: float) -> float:
    return _fall(_share(before, plan.warmup, plan.total), plan.final)


def _exponential(plan: RatePlan, before: float, after: float) -> float:
    return plan.final ** _share(before, plan.warmup, plan.total)


def _inverse_sqrt(plan: RatePlan, before: float, after: float) -> float:
    return math.sqrt(plan.warmup / max(after, plan.warmup))


def _step(plan: RatePlan, before: float, after: float) -> float:
    passed = [mark for mark in plan.marks if mark <= before]
    return plan.by ** len(passed)


def _wsd(plan: RatePlan, before: float, after: float) -> float:
    start = max(plan.warmup, plan.total - plan.decay)
    return 1 - (1 - plan.final) * _share(before, start, plan.total)


def _one_cycle(plan: RatePlan, before: float, after: float) -> float:
    top, last = plan.warmup - 1, plan.total - 1  # the steps with the largest and the smallest learning rate
    if before < top:
        return 1 - (1 - _START_OF_CYCLE) * _fall(before / top, 0.0)
    return _fall(_share(before, top, last), plan.final)


SHAPES: dict[str, Shape] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse-sqrt": _inverse_sqrt,
    "exponential": _exponential,
    "step": _step,
    "one-cycle": _one_cycle,
    "wsd": _wsd,
}
ENDLESS = ("constant", "inverse-sqrt")  # shapes that need no total


Given = int | str | Length


@dataclass(frozen=True)
class RateRequest:
    """The requested schedule. See :func:`~lightning_fasttrain.build_schedule` for the arguments."""

    shape: str
    warmup: Length
    total: Length | None
    final: float
    at: tuple[Length, ...]
    by: float
    decay: Length

    @property
    def clock(self) -> str:
        """The unit to be counted."""
        return next(iter(self.clocks), "steps")

    @property
    def clocks(self) -> dict[str, Length]:
        """The units to be counted, each with the last length in that unit."""
        return {length.clock: length for length in self.lengths if length.clock is not None and length.amount}

    @property
    def lengths(self) -> list[Length]:
        """All lengths that apply to the shape."""
        used = [self.warmup, *self.at]
        if self.shape == "wsd":
            used.append(self.decay)
        if self.total is None:
            return used
        return [self.total, *used]

    @property
    def needs_run(self) -> bool:
        """Whether the plan needs a Trainer, to determine the length of the run or of an epoch."""
        units = {length.unit for length in self.lengths}
        return "epochs" in units or (self.total is None and ("share" in units or self.shape not in ENDLESS))

    def plan(self, total: float = math.inf, steps_of_epochs: Callable[[float], float] | None = None) -> RatePlan:
        """Return the plan.

        Args:
            total: the length of the run, if none was requested.
            steps_of_epochs: converts epochs to optimizer steps, if epochs were requested.
        """

        def number(length: Length, whole: float) -> float:
            if length.unit == "share":
                return max(1, round(length.amount * whole))  # at least 1 in short runs
            if length.unit == "epochs":
                assert steps_of_epochs is not None  # ``needs_run`` is true, so there is a Trainer
                return round(steps_of_epochs(length.amount))
            return length.amount

        end = total if self.total is None else number(self.total, total)
        warmup = number(self.warmup, end) if self.warmup.amount else 0.0
        self._refuse_long_warmup(warmup, end)
        if self.shape == "one-cycle":
            # Torch's ``pct_start``: a cycle must rise.
            warmup = warmup or number(Length(0.3, "share"), end)
        marks = tuple(number(mark, end) for mark in self.at)
        decay = number(self.decay, end) if self.shape == "wsd" else 0.0
        for mark in marks:
            if mark >= end:
                what = f"at={mark:,.0f} in a run of {end:,.0f} {self.clock}"
                warn(explain(what, "the learning rate does not fall there", "Use shares: at=['50%', '75%']"))
        return RatePlan(self.shape, self.clock, warmup, end, self.final, marks, self.by, decay)

    def _refuse_long_warmup(self, warmup: float, end: float) -> None:
        if warmup <= end:
            return
        what = f"a warmup of {warmup:,.0f} {self.clock} in a run of {end:,.0f}"
        message = explain(what, "the learning rate never reaches its full value", "Use a share of it: warmup='5%'")
        if self.total is not None:
            raise ValueError(message)
        warn(message)  # the Trainer's run may be shortened for a test


def read_request(
    shape: str, warmup: Given, total: Given | None, final: float, at: Iterable[Given], by: float, decay: Given
) -> RateRequest:
    """Parse a requested schedule, and refuse invalid arguments.

    Raises:
        ValueError: names the argument, the reason and the solution.
    """
    one_of("shape", shape, tuple(SHAPES))
    listed = (at,) if isinstance(at, str) else at
    marks = [read_length("at", mark) for mark in listed]
    whole = None if total is None else read_length("total", total)
    request = RateRequest(
        shape, read_length("warmup", warmup), whole, final, tuple(marks), by, read_length("decay", decay)
    )
    _refuse_two_clocks(request)
    of_total = request.total
    unfit = [
        (not 0 <= final <= 1, f"final={final}", "expected a share of the learning rate", "Use a number from 0 to 1"),
        (not 0 < by <= 1, f"by={by}", "expected the factor at each mark", "Use a number above 0, up to 1"),
        (
            of_total is not None and (of_total.unit == "share" or of_total.amount == 0),
            f"total={total!r}",
            "other lengths can be shares of it, so it cannot be one itself",
            "Use total=10_000",
        ),
        (
            shape == "exponential" and final == 0,
            "'exponential' with final=0",
            "a learning rate that is multiplied by the same factor in each step never reaches 0",
            "Use final=0.01",
        ),
        (
            shape == "inverse-sqrt" and request.warmup.amount == 0,
            "'inverse-sqrt' without warmup",
            "it falls as √(warmup / step), so the length of the warmup determines how fast",
            "Use warmup=1000",
        ),
        (shape == "step" and not request.at, "'step' without at", "its marks are missing", "Use at=['50%', '75%']"),
        (
            shape != "step" and bool(request.at),
            f"at={at} with {shape!r}",
            "only 'step' uses marks",
            "Remove it",
        ),
    ]
    for is_so, what, why, way_out in unfit:
        if is_so:
            raise ValueError(explain(what, why, way_out))
    return request


def _refuse_two_clocks(request: RateRequest) -> None:
    if len(request.clocks) > 1:
        both = " and ".join(map(str, request.clocks.values()))
        why = "samples and tokens cannot be converted into each other: sequence lengths vary"
        raise ValueError(explain(both, why, "Give all lengths in one of them, or as shares: warmup='5%'"))
    if request.clock != "steps" and request.total is None and request.shape not in ENDLESS:
        why = "the Trainer knows its number of steps, but not of samples or tokens"
        raise ValueError(explain(f"{request.clock} without total", why, "Give total='1e9tok'"))


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
    from matplotlib.figure import Figure

    # Not pyplot, which selects a backend for the whole process and keeps its figures.
    figure = Figure(figsize=(8, 3.6), layout="constrained")
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
    return write_atomic(path, functools.partial(figure.savefig, format=kind.removeprefix("."), dpi=150))
