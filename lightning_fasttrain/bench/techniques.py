"""The table of techniques, from the code: what each does, how exact it is, where it acts, what to call in a loop."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_fasttrain import data, finetune, loss, model, optim, run
from lightning_fasttrain._technique import Technique
from lightning_fasttrain.bench.judge import TIME_WORTH

ROOMS = (data, model, finetune, loss, optim, run)


def techniques() -> Iterator[type[Technique]]:
    """Every technique of the package, room by room, in alphabetical order.

    Example:
        >>> [technique.__name__ for technique in techniques()][:2]
        ['DevicePrefetch', 'MicroBatching']
    """
    for room in ROOMS:
        found = inspect.getmembers(room, inspect.isclass)
        yield from (thing for _, thing in found if issubclass(thing, Technique))


def markdown_table(ladder: Mapping[str, Any] | None = None) -> str:
    """The techniques as a Markdown table.

    Args:
        ladder: the contents of a ``ladder.json``: adds what the rungs of it measured, against the rung below.

    Returns:
        The table, without a trailing newline.
    """
    measured = _measured(ladder) if ladder is not None else {}
    head = ["technique", "what it does", "exactness", "in a Fabric or bare loop"]
    rows = [
        [
            f"`{technique.__name__}`",
            technique.effect,
            technique.exactness.value.replace("_", " "),
            _as_code(technique.in_a_loop),
        ]
        for technique in techniques()
    ]
    if measured:
        head.append("measured: time, peak memory")
        for row, technique in zip(rows, techniques(), strict=True):
            row.append(measured.get(technique.__name__, ""))
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _as_code(text: str) -> str:
    return text if text.startswith("nothing") else f"`{text}`"


def _measured(ladder: Mapping[str, Any]) -> dict[str, str]:
    """For each technique that a rung added or changed alone: its time and memory as factors of the state below it."""
    found: dict[str, dict[str, str]] = {}
    noise = max(TIME_WORTH, ladder["noise"]["time"] or 0.0)
    below: Mapping[str, Any] = ladder["rungs"][0]
    for rung in ladder["rungs"][1:]:
        before = below["state"]["callbacks"]
        new = [name for name, arguments in rung["state"]["callbacks"].items() if before.get(name) != arguments]
        if rung["error"] is None and len(new) == 1:
            time, memory = (rung[key] / below[key] for key in ("step_ms", "peak_mib"))
            factors = f"{'≈' if abs(time - 1) <= noise else '×'}{time:.2f}, ×{memory:.2f}"
            found.setdefault(new[0], {})[rung["name"]] = factors
        below = rung if rung["carried"] else below
    return {
        name: "; ".join(factors if len(rungs) == 1 else f"{rung} {factors}" for rung, factors in rungs.items())
        for name, rungs in found.items()
    }
