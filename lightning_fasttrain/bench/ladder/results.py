"""Results of a ladder: a row for each run, how rows compare, whether a rung is kept, and the file that holds them."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.messages import explain, first_line
from lightning_fasttrain.core.safe_load import local_path, read_json
from lightning_fasttrain.planner.timing import Ratio, compare_times
from lightning_fasttrain.technique import Exactness

# How a run is made, in plain JSON, so that a fresh process can make it:
#   callbacks: name of a callback of this package → its keyword arguments, of which {"EveryBlock": {"k": 2}} stands for
#              EveryBlock(k=2); or None, to take it away
#   trainer:   keyword arguments of L.Trainer
#   optimizer: keyword arguments of GPTModule that say which optimizer it has
#   loop:      how the loop around it behaves; compile: arguments of torch.compile for the model with its loss
State = dict[str, dict[str, Any]]


@dataclass
class Row:
    """A rung with its measurements and its verdict; of a failed run, the error, and NaN for the values.

    Times are those of the ladder's clock: of the processors on a CPU, of events on a GPU. Only ratios of two states
    that were run in turn are measured, so ``step_ms`` is that of the row it was ``compared`` with, times their ratio.
    ``plus_minus`` is the half-width of the interval that contains ``step_ms`` / naive's with a confidence of 95%,
    relative to it.

    Attributes:
        exactness: of the whole state.
        own_exactness: of the rung alone.
        free: whether the rung should cost neither time nor memory.
        carried: None while it is undecided.
        compared: name of the row that it was run in turn with.
        ratio: its time as a factor of that row's: lower end of the interval, estimate, upper end.
        turns_ms: ms per step of that row and of this one, in each turn; of naive, and in the last rounds, of this one.
        wall_ms: ms per step by the wall clock, the median of all turns.
    """

    error: str | None = None
    step_ms: float = math.nan
    tokens_per_s: float = math.nan
    peak_mib: float = math.nan
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    disturbed_cores: float | None = None
    notes: list[str] = field(default_factory=list)
    name: str = ""
    title: str = ""
    exactness: Exactness = Exactness.EXACT
    own_exactness: Exactness = Exactness.EXACT
    free: bool = False
    host: str = "trainer"
    warmup: int = 1
    carried: bool | None = False
    verdict: str = ""
    state: State = field(default_factory=dict)
    compared: str = ""
    ratio: list[float] = field(default_factory=list)
    plus_minus: float = 0.0
    turns_ms: list[list[float]] = field(default_factory=list)
    wall_ms: float = math.nan
    max_loss_delta: float | None = None
    trainer_overhead: float | None = None
    alone: "Row | None" = None

    def set_ratio(self, ratio: Ratio, base: "Row") -> None:
        """Derive the time from that of another row, with which this one was run in turn."""
        self.ratio = [ratio.low, ratio.value, ratio.high]
        self.step_ms = base.step_ms * ratio.value
        self.plus_minus = math.hypot(base.plus_minus, ratio.plus_minus)

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        """Read a row from its JSON, also from that of an earlier version."""
        # null: nothing was measured
        known = {key: value for key, value in _known_of(cls, values).items() if value is not None}
        for key in ("exactness", "own_exactness"):
            known[key] = Exactness(known[key])
        if "alone" in known:
            known["alone"] = cls.read(known["alone"])
        return cls(**{"carried": None, **known})  # null there: undecided


@dataclass
class Climbed:
    """A complete ladder: the content of ``ladder.json``.

    Attributes:
        noise: ``time``: the median of the half-widths of the rungs' ratios; ``memory``: what is ignored.
        turns: the most turns of a comparison.
        clock: ``"processor"``, ``"device"``, or ``"wall"`` in the files of earlier versions.
        skipped: name, title and reason of each rung that cannot be run on this machine.
        padded: two runs on texts of different lengths, the second with the padding cut off.
        finals: naive, the strong baselines, the best states of the climb, and the step's matrix products alone, run
            once more, all of them in turn; :func:`compare_in_turn` has the ratio of any two.
        tops: the stacks "fast", "balanced" and "lean", each with the code that makes it, and its time and memory
            against each baseline, measured in those turns.
    """

    hardware: dict[str, Any]
    versions: dict[str, str]
    command: str
    date: str
    model: dict[str, Any]
    skipped: list[dict[str, str]]
    noise: dict[str, float | None]
    turns: int = 0
    clock: str = "wall"
    rungs: list[Row] = field(default_factory=list)
    bare_loop: Row | None = None
    padded: list[Row] = field(default_factory=list)
    finals: list[Row] = field(default_factory=list)
    tops: dict[str, dict[str, Any]] = field(default_factory=dict)
    interrupted: bool = False

    def write(self, path: Path) -> None:
        """Write the JSON atomically."""
        write_atomic(path, json.dumps(_to_json(asdict(self)), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a ladder from its file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not what :meth:`write` writes.
        """
        values = read_json(local_path(path))
        try:
            return cls._from_json(values)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"it does not hold the results of a ladder ({type(error).__name__}: {first_line(error)})"
            raise ValueError(explain(f"{path} cannot be read", why, "Run fasttrain ladder again")) from error

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> Self:
        runs = {name: list(map(Row.read, values.get(name, []))) for name in ("padded", "finals")}
        runs["rungs"] = list(map(Row.read, values["rungs"]))
        bare_loop = values["bare_loop"] and Row.read(values["bare_loop"])
        tops = values["tops"] if runs["finals"] else {}  # those of earlier versions were measured otherwise
        return cls(**{**_known_of(cls, values), **runs, "bare_loop": bare_loop, "tops": dict(tops)})


def _known_of(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of the dataclass ``kind``; files of earlier versions have others too."""
    names = set(map(attrgetter("name"), fields(kind)))
    return {name: value for name, value in values.items() if name in names}


def _to_json(value: object) -> Any:
    """Convert ``value`` to JSON's own types, with null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.value if isinstance(value, Enum) else value


# Names of the rows that a stack is compared with, the weakest first, and of the limit of any training.
BASELINES = ("naive", "strong", "compiled")
PRODUCTS = "products"

# Times that differ by less are called equal on any machine: it would not be worth a line of code.
TIME_WORTH = 0.03
# Memory is counted, not sampled: two runs agree to the byte, so this only asks that a saving is worth a mention.
MEMORY_WORTH = 0.005
# What a rung has to save in memory to be carried where its time could not be decided.
CLEAR_SAVING = 0.05
# No rung may cost more than this many times naive's time, however much memory it saves.
MOST_TIME = 1.5


def judge(time: Ratio, memory: float) -> bool | None:
    """Decide whether a rung is carried into the next: what it gains in one of time and memory is more than it costs.

    time · memory, as factors of the state below, must be under 1 wherever in the interval the time really lies; without
    a gain in memory, by :data:`TIME_WORTH`. A slower rung must save twice that, time² · memory < 1: what it takes of
    :data:`MOST_TIME` is lost for later rungs, which may save more for it.

    Args:
        time: its time as a factor of that of the state below.
        memory: its peak memory as a factor of that of the state below.

    Returns:
        Carried or not; None if the interval of the time is too wide to decide.

    Example:
        >>> judge(Ratio(1.30, 1.25, 1.35), 0.5), judge(Ratio(1.22, 1.19, 1.25), 0.984), judge(Ratio(0.9, 0.8, 1.1), 1.0)
        (True, False, None)
    """
    gains = cost(time.high) * memory < 1
    loses = cost(time.low) * memory > 1 - TIME_WORTH
    # Both, if the gain is certain and small: enough if it is memory, which can be trusted to be there in each run.
    if gains and loses:
        return memory < 1
    return gains if gains or loses else None


def cost(time: float) -> float:
    """Return the factor by which a program that takes so many times as long must need less memory.

    Example:
        >>> cost(0.8), cost(1.02), cost(1.5)
        (0.8, 1.02, 2.25)
    """
    return time if time <= 1 + TIME_WORTH else time**2


def judge_row(row: Row, below: Row, naive: Row) -> tuple[bool | None, str]:
    """Decide whether a rung is carried, and say why in a sentence.

    Args:
        row: the rung, with its ratio to the row below.
        below: the state that it was put on.
        naive: the state whose time it may exceed by :data:`MOST_TIME` at most.

    Returns:
        Carried or not, or None if another turn may decide; and the sentence.

    Example:
        >>> naive = Row(step_ms=100, peak_mib=800)
        >>> judge_row(Row(step_ms=130, peak_mib=400, ratio=[1.25, 1.3, 1.35]), naive, naive)
        (True, 'Needs 2.0 times less memory and 30% more time.')
        >>> judge_row(Row(step_ms=140, peak_mib=720, ratio=[1.35, 1.4, 1.45]), naive, naive)
        (False, 'Needs 10% less memory and 40% more time: not carried.')
        >>> judge_row(Row(step_ms=130, peak_mib=400, ratio=[1.25, 1.3, 1.35], free=True), naive, naive)
        (False, 'Needs 2.0 times less memory and 30% more time: not carried.')
    """
    if row.error is not None:
        return False, "Failed."
    if below.error is not None:
        return False, "There is nothing to compare it with."
    time, memory = ratio_of(row), _ignore_small(MEMORY_WORTH, row.peak_mib / below.peak_mib)
    needs = describe(time, memory)
    if row.own_exactness is Exactness.CHANGES_TRAINING:
        return False, f"{needs}, and changes training: not carried."
    carried = judge(time, memory)
    if row.free and carried and time.high > 1 + TIME_WORTH:  # it saves memory, and is not free here
        carried = None if time.low <= 1 + TIME_WORTH else False
    if carried and naive.error is None and row.step_ms > MOST_TIME * naive.step_ms:
        return False, f"{needs}, over {MOST_TIME:g} times naive's: not carried."
    if carried is False:
        return False, f"{needs}: not carried."
    return carried, f"{needs}."


def judge_undecided(row: Row, below: Row) -> tuple[bool, str]:
    """Decide where the time was not decided: a trade by memory alone, what is free by the estimate.

    A rung that is certainly slower is left out. Little is lost by a free one that does nothing.

    Example:
        >>> judge_undecided(Row(peak_mib=720, ratio=[0.9, 1.1, 1.3]), Row(peak_mib=800))
        (True, 'Needs 10% less memory; its time, ×0.90 to ×1.30, is not decided.')
        >>> judge_undecided(Row(peak_mib=520, ratio=[1.4, 1.5, 1.6]), Row(peak_mib=800))
        (False, 'Needs 1.5 times less memory; its time, ×1.40 to ×1.60, is not decided: not carried.')
    """
    time, memory = ratio_of(row), _ignore_small(MEMORY_WORTH, row.peak_mib / below.peak_mib)
    # What the next rungs need of naive's time is not spent on what may not be worth it.
    carried = memory <= 1 - CLEAR_SAVING and time.low <= 1 + TIME_WORTH
    if row.free:
        carried = time.value * memory <= 1 - TIME_WORTH and time.value <= 1 + TIME_WORTH
    between = f"×{time.low:.2f} to ×{time.high:.2f}"
    sentence = f"Needs {_more_or_less(memory, 'memory')}; its time, {between}, is not decided"
    return carried, f"{sentence}." if carried else f"{sentence}: not carried."


def ratio_of(row: Row) -> Ratio:
    """Return the ratio of a row's time to that of the row it was compared with."""
    low, value, high = row.ratio
    return Ratio(value, low, high)


def describe(time: Ratio, memory: float) -> str:
    """Say what a program needs in comparison with another.

    Example:
        >>> describe(Ratio(0.5, 0.49, 0.51), 1.0), describe(Ratio(1.01, 0.99, 1.03), 1.0)
        ('Needs as much memory and 2.0 times less time', 'Needs as much memory and about as much time')
    """
    return f"Needs {_more_or_less(memory, 'memory')} and {_more_or_less(_certain(time), 'time')}"


def _certain(time: Ratio) -> float:
    """Return the ratio, or 1 where the two times may be equal, or nearly are."""
    near = abs(time.value - 1) < TIME_WORTH or time.low <= 1 <= time.high
    return 1.0 if near else time.value


def _ignore_small(share: float, ratio: float) -> float:
    return 1.0 if abs(ratio - 1) <= share else ratio


def _more_or_less(ratio: float, what: str) -> str:
    """Format a ratio: as a percentage while it is small, otherwise as a factor."""
    if ratio == 1.0 and what == "memory":
        return "as much memory"
    if ratio == 1.0:
        return f"about as much {what}"
    if ratio >= 1.5:
        return f"{ratio:.1f} times as much {what}"
    if ratio < 1 and 1 / ratio >= 1.5:
        return f"{1 / ratio:.1f} times less {what}"
    word = "more" if ratio > 1 else "less"
    percent = 100 * abs(ratio - 1)
    digits = int(percent < 1.5)
    return f"{percent:.{digits}f}% {word} {what}"


def compare_in_turn(row: Row, base: Row) -> Ratio:
    """Return the time of a row as a factor of that of another one, which was run in the same turns.

    Example:
        >>> compare_in_turn(Row(turns_ms=[[50.0], [61.0]]), Row(turns_ms=[[100.0], [120.0]])).value
        0.50414...
    """
    return compare_times(list(itertools.chain(*base.turns_ms)), list(itertools.chain(*row.turns_ms)))


def trainer_verdict(overhead: Ratio) -> str:
    """Describe a Trainer's step by its time as a factor of that of the bare loop.

    Example:
        >>> trainer_verdict(Ratio(1.02, 0.99, 1.05)), trainer_verdict(Ratio(1.2, 1.15, 1.25))
        ("The Trainer's step takes as long.", "The Trainer's step takes ×1.20 of this.")
    """
    factor = _certain(overhead)
    return "The Trainer's step takes as long." if factor == 1 else f"The Trainer's step takes ×{factor:.2f} of this."


def choose_stacks(naive: Row, rows: list[Row], limit_mib: float) -> dict[str, Row]:
    """Choose the best states for three purposes; of equal ones the first, which has the fewest techniques.

    Args:
        naive: the naive loop.
        rows: the other states.
        limit_mib: peak memory of the leaner strong baseline.

    Returns:
        "fast": the least time in no more than ``limit_mib``, "balanced": the least product of time and memory in no
        more than naive's time, "lean": the least memory within :data:`MOST_TIME` of it. A purpose that no state serves
        is missing.

    Example:
        >>> measured = [(50, 700), (60, 390), (62, 200), (90, 80), (140, 60), (200, 20)]
        >>> rows = [Row(step_ms=step_ms, peak_mib=peak_mib) for step_ms, peak_mib in measured]
        >>> stacks = choose_stacks(Row(step_ms=100, peak_mib=800), rows, limit_mib=400)
        >>> {name: row.peak_mib for name, row in stacks.items()}
        {'fast': 390, 'balanced': 80, 'lean': 60}
    """
    ran = finished_rows(naive, rows)
    small = [row for row in ran if row.peak_mib <= limit_mib]
    quick = [row for row in ran if row.step_ms <= (1 + TIME_WORTH) * naive.step_ms]
    in_time = [row for row in ran if row.step_ms <= MOST_TIME * naive.step_ms]
    by_purpose: dict[str, tuple[list[Row], Callable[[Row], float]]] = {
        "fast": (small, _time),
        "balanced": (quick, lambda row: row.step_ms * row.peak_mib),
        "lean": (in_time, _memory),
    }
    return {name: _pick_least(found, cost) for name, (found, cost) in by_purpose.items() if found}


_time, _memory = attrgetter("step_ms"), attrgetter("peak_mib")


def _pick_least(rows: list[Row], cost: Callable[[Row], float]) -> Row:
    """Return the row with the least cost; of nearly equal ones the first, which has the fewest techniques."""
    least = min(map(cost, rows))
    return next(row for row in rows if cost(row) <= least * (1 + MEMORY_WORTH))


def finished_rows(naive: Row, rows: list[Row]) -> list[Row]:
    """Return the rows that ran and keep training the same; none if naive failed."""
    if naive.error is not None:
        return []
    return [row for row in rows if row.error is None and row.exactness is not Exactness.CHANGES_TRAINING]


def loss_parity(measured: Row, naive: Row | None) -> float | None:
    """Return the largest difference of any step's loss from naive's; None if one of the two failed.

    Args:
        measured: a run.
        naive: the one to compare with; None if ``measured`` is it.

    Example:
        >>> loss_parity(Row(losses=[3.0, 2.0]), Row(losses=[3.0, 2.5]))
        0.5
    """
    if measured.error is not None:
        return None
    if naive is None:
        return 0.0
    if naive.error is not None:
        return None
    return max(abs(a - b) for a, b in zip(measured.losses, naive.losses, strict=False))


def refuse_non_finite(measured: dict[str, Any]) -> dict[str, Any]:
    """Return ``measured``, or an error if one of its losses is not finite, since such a run trains nothing.

    Example:
        >>> refuse_non_finite({"losses": [3.0, float("nan")]})
        {'error': 'the loss is not finite from step 2 on'}
    """
    for step, loss in enumerate(measured.get("losses", ()), start=1):
        if not math.isfinite(loss):
            return {"error": f"the loss is not finite from step {step} on"}
    return measured
