"""Compare the measurements of a rung with those of another: ratios, loss parity, and whether it is kept."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from lightning_fasttrain.bench.ladder.results import Measured, Row
from lightning_fasttrain.planner.timing import Ratio
from lightning_fasttrain.technique import Exactness

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
    if carried and naive.error is None and row.step_ms > MOST_TIME * naive.step_ms:
        return False, f"{needs}, over {MOST_TIME:g} times naive's: not carried."
    if carried is False:
        return False, f"{needs}: not carried."
    return carried, f"{needs}."


def judge_by_memory(row: Row, below: Row) -> tuple[bool, str]:
    """Decide by memory alone, if the time was not decided; a rung that is certainly slower is left out.

    Example:
        >>> judge_by_memory(Row(peak_mib=720, ratio=[0.9, 1.1, 1.3]), Row(peak_mib=800))
        (True, 'Needs 10% less memory; its time, ×0.90 to ×1.30, is not decided.')
        >>> judge_by_memory(Row(peak_mib=520, ratio=[1.4, 1.5, 1.6]), Row(peak_mib=800))
        (False, 'Needs 1.5 times less memory; its time, ×1.40 to ×1.60, is not decided: not carried.')
    """
    time, memory = ratio_of(row), _ignore_small(MEMORY_WORTH, row.peak_mib / below.peak_mib)
    # What the next rungs need of naive's time is not spent on what may not be worth it.
    carried = memory <= 1 - CLEAR_SAVING and time.low <= 1 + TIME_WORTH
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


def error_of_product(row: Row, other: Row) -> float:
    """Return the relative half-width of the ratio of two rows' times, which were not measured in turn.

    Example:
        >>> round(error_of_product(Row(plus_minus=0.03), Row(plus_minus=0.04)), 3)
        0.05
    """
    return math.hypot(row.plus_minus, other.plus_minus)


def trainer_verdict(overhead: Ratio) -> str:
    """Describe a Trainer's step by its time as a factor of that of the bare loop.

    Example:
        >>> trainer_verdict(Ratio(1.02, 0.99, 1.05)), trainer_verdict(Ratio(1.2, 1.15, 1.25))
        ("The Trainer's step takes as long.", "The Trainer's step takes ×1.20 of this.")
    """
    factor = _certain(overhead)
    return "The Trainer's step takes as long." if factor == 1 else f"The Trainer's step takes ×{factor:.2f} of this."


def fastest_with_half_the_memory(rows: list[Row], noise: float) -> Row | None:
    """Return the fastest row with at most half of naive's memory; of times within the noise, the leanest.

    Args:
        rows: the ladder's, naive first.
        noise: share by which times differ without a cause.

    Example:
        >>> measured = [(100, 80), (50, 60), (70, 20), (71, 10), (90, 8)]
        >>> rows = [Row(step_ms=step_ms, peak_mib=peak_mib) for step_ms, peak_mib in measured]
        >>> fastest_with_half_the_memory(rows, 0.03).peak_mib, leanest_in_time(rows, 0.03).peak_mib
        (10, 8)
    """
    lean = [row for row in _finished_rows(rows) if row.peak_mib <= rows[0].peak_mib / 2]
    return _pick_least(_near_least(lean, _time, max(TIME_WORTH, noise)), _memory, MEMORY_WORTH)


def leanest_in_time(rows: list[Row], noise: float) -> Row | None:
    """Return the leanest row within :data:`MOST_TIME` of naive's time, the fastest of equal ones; None without one.

    Args:
        rows, noise: as for :func:`fastest_with_half_the_memory`.
    """
    naive = rows[0]
    in_time: list[Row] = []
    for row in _finished_rows(rows):
        is_leaner = row.peak_mib < naive.peak_mib * (1 - MEMORY_WORTH)
        if is_leaner and row.step_ms <= MOST_TIME * naive.step_ms:
            in_time.append(row)
    return _pick_least(_near_least(in_time, _memory, MEMORY_WORTH), _time, max(TIME_WORTH, noise))


_time, _memory = attrgetter("step_ms"), attrgetter("peak_mib")


def _near_least(rows: list[Row], cost: Callable[[Row], float], share: float) -> list[Row]:
    least = min(map(cost, rows), default=0.0)
    return [row for row in rows if cost(row) <= least * (1 + share)]


def _pick_least(rows: list[Row], cost: Callable[[Row], float], share: float) -> Row | None:
    """Return the row with the least cost; of nearly equal ones the first, which has the fewest techniques."""
    return next(iter(_near_least(rows, cost, share)), None)


def _finished_rows(rows: list[Row]) -> list[Row]:
    """Return the rows above naive that ran and keep training the same; none if naive failed."""
    naive, *above = rows
    if naive.error is not None:
        return []
    return [row for row in above if row.error is None and row.exactness is not Exactness.CHANGES_TRAINING]


def loss_parity(measured: Measured, naive: Measured | None) -> float | None:
    """Return the largest difference of any step's loss from naive's; None if one of the two failed.

    Args:
        measured: a run.
        naive: the one to compare with; None if ``measured`` is it.

    Example:
        >>> loss_parity(Measured(losses=[3.0, 2.0]), Measured(losses=[3.0, 2.5]))
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
