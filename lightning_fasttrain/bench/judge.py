"""What a rung's measurements say beside another's: ratios, loss parity, and whether it is worth keeping."""

import math
from typing import Any

Row = dict[str, Any]

# Runs of one and the same program differ by this share, also the fastest of a few. On a CPU clock rates, page placement
# and neighbours come and go: on a shared machine with two cores the same step took 600 ms in one process and 720 ms in
# the next four.
LEAST_TIME_NOISE = {"cuda": 0.03, "cpu": 0.25}
# More than this is another program that came between, and says nothing about the next two runs.
MOST_TIME_NOISE = 0.30
# Memory is counted, not sampled: two runs agree to the byte, so this only asks that a saving is worth a mention.
MEMORY_NOISE = 0.005


def judge(row: Row, below: Row, time_noise: float = 0.03) -> tuple[bool, str]:
    """Whether a rung is carried into the next, and what to say of it.

    It is carried if ms/step × peak MiB falls: time lost must be won back in memory, and the other way round. Of each
    ratio only what goes beyond the noise counts.

    Args:
        row: the rung, with ``step_ms``, ``peak_mib`` and ``error``.
        below: the state that it was put on.
        time_noise: share by which times differ without a cause.

    Returns:
        Carried or not, and a few words for the table.

    Example:
        >>> below = {"step_ms": 100.0, "peak_mib": 800.0, "error": None}
        >>> judge({"step_ms": 130.0, "peak_mib": 400.0, "error": None}, below)
        (True, 'memory ÷2.0, slower here (time +30%)')
        >>> judge({"step_ms": 300.0, "peak_mib": 720.0, "error": None}, below)
        (False, 'memory −10%, slower here (time ×3.0): not carried')
    """
    if row["error"] is not None:
        return False, "failed"
    if below["error"] is not None:
        return False, "nothing to compare with"
    time = _beyond(time_noise, row["step_ms"] / below["step_ms"])
    memory = _beyond(MEMORY_NOISE, row["peak_mib"] / below["peak_mib"])
    words = [f"memory {_change(memory)}"] if memory < 1 else []
    words += [f"time {_change(time)}"] if time < 1 else []
    words += [f"more memory here ({_change(memory)})"] if memory > 1 else []
    words += [f"slower here (time {_change(time)})"] if time > 1 else []
    if _certain(time_noise, time) * _certain(MEMORY_NOISE, memory) < 1:
        return True, ", ".join(words)
    return False, f"{', '.join(words) or 'no clear gain here'}: not carried"


def time_noise(row: Row, device: str) -> float:
    """By which share times differ without a cause on this machine: the runs of one row tell.

    Args:
        row: with ``step_ms_of_runs``.
        device: ``"cuda"`` or ``"cpu"``.

    Example:
        >>> round(time_noise({"step_ms_of_runs": [100.0, 92.0]}, "cuda"), 2)
        0.09
    """
    runs = row["step_ms_of_runs"]
    spread = max(runs) / min(runs) - 1 if runs else 0.0
    return min(max(LEAST_TIME_NOISE[device], spread), MOST_TIME_NOISE)


def _beyond(noise: float, ratio: float) -> float:
    return 1.0 if abs(ratio - 1) <= noise else ratio


def _certain(noise: float, ratio: float) -> float:
    """The ratio as it is at least, if noise has made it look larger than it is."""
    return max(1.0, ratio / (1 + noise)) if ratio > 1 else min(1.0, ratio * (1 + noise))


def _change(ratio: float) -> str:
    """A ratio as people say it: percent while it is small, a factor when it is not."""
    if ratio >= 1.5:
        return f"×{ratio:.1f}"
    if ratio <= 1 / 1.5:
        return f"÷{1 / ratio:.1f}"
    percent = 100 * abs(ratio - 1)
    return (
        f"{'+' if ratio > 1 else '−'}{percent:.0f}%" if percent >= 1.5 else f"{'+' if ratio > 1 else '−'}{percent:.1f}%"
    )


def trainer_verdict(overhead: float, time_noise: float) -> str:
    """What to say of a Trainer's step that takes ``overhead`` times as long as the bare loop's.

    Example:
        >>> trainer_verdict(1.02, 0.03), trainer_verdict(1.2, 0.03)
        ("the Trainer's step takes as long", "the Trainer's step takes ×1.20 of this")
    """
    if abs(overhead - 1) <= time_noise:
        return "the Trainer's step takes as long"
    return f"the Trainer's step takes ×{overhead:.2f} of this"


def loss_parity(measured: Row, naive: Row | None) -> float | None:
    """The largest difference of any step's loss from naive's: over the whole run, not at its end. None: no naive.

    Args:
        measured: with ``losses``, unless it has failed.
        naive: the row to compare with; None if ``measured`` is it.

    Example:
        >>> loss_parity({"losses": [3.0, 2.0]}, {"losses": [3.0, 2.5], "error": None})
        0.5
    """
    if measured.get("error") is not None:
        return None
    if naive is None:
        return 0.0
    if naive["error"] is not None:
        return None
    return max(abs(a - b) for a, b in zip(measured["losses"], naive["losses"], strict=True))


def ratios(row: Row, base: Row) -> Row:
    """How many times faster, and in how many times less memory, ``row`` runs than ``base``; None where one failed."""
    if row["error"] is not None or base["error"] is not None:
        return {"step_ms": None, "peak_mib": None, "speedup": None, "memory_ratio": None}
    return {
        "step_ms": row["step_ms"],
        "peak_mib": row["peak_mib"],
        "speedup": base["step_ms"] / row["step_ms"],
        "memory_ratio": base["peak_mib"] / row["peak_mib"],
    }


def refuse_non_finite(measured: Row) -> Row:
    """``measured``, or a failure if one of its losses is no number: such a run has not trained anything.

    Example:
        >>> refuse_non_finite({"losses": [3.0, float("nan")]})
        {'error': 'the loss is not finite from step 2 on'}
    """
    for step, loss in enumerate(measured.get("losses", ()), start=1):
        if not math.isfinite(loss):
            return {"error": f"the loss is not finite from step {step} on"}
    return measured
