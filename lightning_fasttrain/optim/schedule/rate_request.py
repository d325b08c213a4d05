"""What was asked for about a rate, and the same in numbers once the length of the run is known: a plan."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.optim.schedule.rate_plan import ENDLESS, SHAPES, RatePlan
from lightning_fasttrain.technique.duration import Length, read_length

Given = int | str | Length


@dataclass(frozen=True)
class RateRequest:
    """What was asked for. See :func:`~lightning_fasttrain.build_schedule` for the arguments."""

    shape: str
    warmup: Length
    total: Length | None
    final: float
    at: tuple[Length, ...]
    by: float
    decay: Length

    @property
    def clock(self) -> str:
        """What has to be counted."""
        return next(iter(self.clocks), "steps")

    @property
    def clocks(self) -> dict[str, Length]:
        """What would have to be counted → the last length that asks for it."""
        return {length.clock: length for length in self.lengths if length.clock is not None and length.amount}

    @property
    def lengths(self) -> list[Length]:
        """All that mean something for the shape."""
        used = [self.warmup, *self.at]
        if self.shape == "wsd":
            used.append(self.decay)
        return used if self.total is None else [self.total, *used]

    @property
    def needs_run(self) -> bool:
        """Whether only a Trainer knows its numbers: how long the run is, or an epoch."""
        shares = any(length.unit == "share" for length in self.lengths)
        epochs = any(length.unit == "epochs" for length in self.lengths)
        return epochs or (self.total is None and (shares or self.shape not in ENDLESS))

    def plan(self, total: float = math.inf, steps_of_epochs: Callable[[float], float] | None = None) -> RatePlan:
        """The numbers.

        Args:
            total: of the run, where none was asked for.
            steps_of_epochs: epochs → optimizer steps, where epochs were asked for.
        """

        def number(length: Length, whole: float) -> float:
            if length.unit == "share":
                return max(1, round(length.amount * whole))  # short runs have it too
            if length.unit == "epochs":
                assert steps_of_epochs is not None  # ``needs_run`` says so, and then there is a Trainer to ask
                return round(steps_of_epochs(length.amount))
            return length.amount

        end = total if self.total is None else number(self.total, total)
        warmup = number(self.warmup, end) if self.warmup.amount else 0.0
        if warmup > end:
            warn(f"the warm-up ({warmup:,.0f} {self.clock}) is longer than the run ({end:,.0f}): it will not end.")
        if self.shape == "one-cycle":
            # Torch's ``pct_start``: a cycle has to rise.
            warmup = warmup or number(Length(0.3, "share"), end)
        marks = tuple(number(mark, end) for mark in self.at)
        decay = number(self.decay, end) if self.shape == "wsd" else 0.0
        return RatePlan(self.shape, self.clock, warmup, end, self.final, marks, self.by, decay)


def read_request(
    shape: str, warmup: Given, total: Given | None, final: float, at: Iterable[Given], by: float, decay: Given
) -> RateRequest:
    """Understand what was asked for, and refuse what cannot be.

    Raises:
        ValueError: what was wrong · why · the way out.
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
        (not 0 <= final <= 1, f"final={final}", "it is a share of the rate", "Use a number from 0 to 1"),
        (not 0 < by <= 1, f"by={by}", "the rate is multiplied by it at each mark", "Use a number above 0, up to 1"),
        (
            of_total is not None and (of_total.unit == "share" or of_total.amount == 0),
            f"total={total!r}",
            "shares are taken of it, so it must be a length itself",
            "Use total=10_000",
        ),
        (
            shape == "exponential" and final == 0,
            "'exponential' with final=0",
            "a rate that is multiplied by the same factor in each step never reaches 0",
            "Use final=0.01",
        ),
        (
            shape == "inverse-sqrt" and request.warmup.amount == 0,
            "'inverse-sqrt' without warmup",
            "it falls as √(warmup / step), so the length of the warm-up sets how fast",
            "Use warmup=1000",
        ),
        (shape == "step" and not request.at, "'step' without at", "nothing says when", "Use at=['50%', '75%']"),
        (
            shape != "step" and bool(request.at),
            f"at={at} with {shape!r}",
            "only 'step' falls at marks",
            "Leave it out",
        ),
    ]
    for is_so, what, why, way_out in unfit:
        if is_so:
            raise ValueError(explain(what, why, way_out))
    return request


def _refuse_two_clocks(request: RateRequest) -> None:
    if len(request.clocks) > 1:
        both = " and ".join(str(length) for length in request.clocks.values())
        why = "how much one is of the other differs from batch to batch"
        raise ValueError(explain(both, why, "Give all lengths in one of them, or as shares: warmup='5%'"))
    if request.clock != "steps" and request.total is None and request.shape not in ENDLESS:
        why = "the Trainer knows how many steps it takes, but not how many samples or tokens"
        raise ValueError(explain(f"{request.clock} without total", why, "Give total='1e9tok'"))
