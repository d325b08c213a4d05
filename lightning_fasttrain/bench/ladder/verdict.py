"""Compare the measurements of a rung with those of another: ratios, loss parity, and whether it is kept."""

import math
import statistics
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from lightning_fasttrain.bench.ladder.results import Measured, Row
from lightning_fasttrain.technique import Exactness

# Times that differ by less are called equal on any machine: it would not be worth a line of code.
TIME_WORTH = 0.03
# Memory is counted, not sampled: two runs agree to the byte, so this only asks that a saving is worth a mention.
MEMORY_WORTH = 0.005
# No rung may cost more than this many times naive's time, however much memory it saves.
MOST_TIME = 1.5


def judge(row: Row, below: Row, naive: Row, noise: float) -> tuple[bool | None, str]:
    """Decide whether a rung is carried into the next, and describe it in a few words.

    It is carried if ms/step × peak MiB falls, time lost being won back in memory and the other way round, and if it
    stays within :data:`MOST_TIME` of naive's time. That must hold wherever in the noise the times really lie.

    Args:
        row: the rung.
        below: the state that it was put on.
        naive: the state that the limit is of.
        noise: share by which the ratio of the two times may be wrong.

    Returns:
        Carried or not, or None if the noise is too large to decide; and a few words for the table.

    Example:
        >>> naive = Row(step_ms=100, peak_mib=800)
        >>> judge(Row(step_ms=130, peak_mib=400), naive, naive, 0.05)
        (True, 'memory ÷2.0, slower here (time +30%)')
        >>> judge(Row(step_ms=140, peak_mib=720), naive, naive, 0.05)
        (False, 'memory −10%, slower here (time +40%): not carried')
        >>> judge(Row(step_ms=90, peak_mib=800), naive, naive, 0.15)[0]
    """
    if row.error is not None:
        return False, "failed"
    if below.error is not None:
        return False, "nothing to compare with"
    if row.own_exactness is Exactness.CHANGES_TRAINING:
        words = _words(
            _ignore_noise(max(TIME_WORTH, noise), row.step_ms / below.step_ms), row.peak_mib / below.peak_mib
        )
        return False, f"{words}, and changes training: not carried"
    time, memory = row.step_ms / below.step_ms, _ignore_noise(MEMORY_WORTH, row.peak_mib / below.peak_mib)
    words = _words(_ignore_noise(max(TIME_WORTH, noise), time), memory)
    # time · memory below 1 is a gain. Noise is in time alone; where memory falls it speaks for the rung first.
    least_gain = 1.0 if memory < 1 else 1 - TIME_WORTH
    if time * memory >= least_gain and (memory >= 1 or time / (1 + noise) * memory >= 1):
        return False, f"{words or 'no clear gain here'}: not carried"
    # There is a gain as measured, but perhaps none with the noise at its worst.
    if time * (1 + noise) * memory >= least_gain:
        return None, words
    if naive.error is None and row.step_ms > MOST_TIME * naive.step_ms:
        return False, f"{words}, over {MOST_TIME:g} times naive's time: not carried"
    return True, words


def judge_by_memory(row: Row, below: Row, noise: float) -> tuple[bool, str]:
    """Decide by memory alone, if times vary too much.

    Example:
        >>> judge_by_memory(Row(step_ms=103, peak_mib=720), Row(step_ms=100, peak_mib=800), 0.2)
        (True, 'memory −10%; by memory alone, times vary by 20%')
    """
    memory = _ignore_noise(MEMORY_WORTH, row.peak_mib / below.peak_mib)
    words = f"{_words(1.0, memory) or 'no less memory'}; by memory alone, times vary by {noise:.0%}"
    return memory < 1, words if memory < 1 else f"{words}: not carried"


def time_noise(*rows: Row, usual: float) -> float:
    """Return the relative error of the ratio of these rows' times: ``usual``, divided by √k for medians of k runs.

    Args:
        rows: of which the one with the fewest runs counts.
        usual: by which share a single run may be.

    Example:
        >>> time_noise(Row(step_ms_of_runs=[100.0, 140.0, 92.0, 95.0]), usual=0.2)
        0.1
    """
    return usual / math.sqrt(max(1, min(len(row.step_ms_of_runs) for row in rows)))


def usual_noise(rows: Iterable[Row]) -> float:
    """Return the relative error of the time of a single run; 0 if no row was run more than once.

    It is the median, over the rows that were run several times, of the range from the fastest to the slowest run.

    Example:
        >>> round(usual_noise([Row(step_ms_of_runs=[100.0, 110.0]), Row(step_ms_of_runs=[50.0])]), 2)
        0.1
    """
    runs = [row.step_ms_of_runs for row in rows if len(row.step_ms_of_runs) > 1]
    if not runs:
        return 0.0
    return statistics.median([max(times) / min(times) - 1 for times in runs])


def _ignore_noise(share: float, ratio: float) -> float:
    return 1.0 if abs(ratio - 1) <= share else ratio


def _words(time: float, memory: float) -> str:
    words = [f"memory {_change(memory)}"] if memory < 1 else []
    words += [f"time {_change(time)}"] if time < 1 else []
    words += [f"more memory here ({_change(memory)})"] if memory > 1 else []
    words += [f"slower here (time {_change(time)})"] if time > 1 else []
    return ", ".join(words)


def _change(ratio: float) -> str:
    """Format a ratio: as a percentage while it is small, otherwise as a factor."""
    if ratio >= 1.5:
        return f"×{ratio:.1f}"
    if ratio <= 1 / 1.5:
        return f"÷{1 / ratio:.1f}"
    sign = "+" if ratio > 1 else "−"
    percent = 100 * abs(ratio - 1)
    return f"{sign}{percent:.0f}%" if percent >= 1.5 else f"{sign}{percent:.1f}%"


def trainer_verdict(overhead: float, noise: float) -> str:
    """Describe a Trainer's step that takes ``overhead`` times as long as that of the bare loop.

    Example:
        >>> trainer_verdict(1.02, 0.03), trainer_verdict(1.2, 0.03)
        ("the Trainer's step takes as long", "the Trainer's step takes ×1.20 of this")
    """
    if abs(overhead - 1) <= max(TIME_WORTH, noise):
        return "the Trainer's step takes as long"
    return f"the Trainer's step takes ×{overhead:.2f} of this"


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
    leaner = [row for row in _finished_rows(rows) if row.peak_mib < naive.peak_mib * (1 - MEMORY_WORTH)]
    in_time = [row for row in leaner if row.step_ms <= MOST_TIME * naive.step_ms]
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
