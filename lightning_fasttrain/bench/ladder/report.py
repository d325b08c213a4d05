"""Show a ladder: lines while it runs, and tables and code in the terminal."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_fasttrain.bench.ladder.results import BASELINES, Climbed, Row, compare_in_turn, ratio_of
from lightning_fasttrain.core.messages import ReportTable, wrap
from lightning_fasttrain.planner.timing import Ratio

# Heading → kind of the column; a narrow terminal has the last ones below their row.
_COLUMNS = {
    "rung": "name",
    **dict.fromkeys(("× below", "peak MiB", "÷ naive", "max |Δloss|"), "number"),
    "on this device": "prose",
}
CLOCKS = {
    "processor": "ms/step: processor time, summed over the cores",
    "device": "ms/step: by events of the GPU",
    "wall": "ms/step: by the clock",
}


def as_table(ladder: Climbed) -> ReportTable:
    """Return the climb as a table: each rung beside the state that it was run in turn with.

    Args:
        ladder: what ``ladder.json`` holds.
    """
    naive, model = ladder.rungs[0], ladder.model
    title = f"{model['size']} · {model['tokens_per_step']:,} tokens/step · {name_machine(ladder)}"
    notes = [
        "(rung): not carried. × below: times as fast as the state below, run in turn with it. ÷ naive: times less "
        "memory than the naive loop. max |Δloss|: of any step, from its loss."
    ]
    if ladder.padded:
        notes.append("Padded texts are compared with each other.")
    table = ReportTable(title, _COLUMNS, notes)
    for row in ladder.rungs:
        _add(table, _cells(row, naive))
    for one in ladder.skipped:
        _add(table, {"rung": one["title"], "on this device": f"skipped: {one['reason']}"})
    for rows, base in (([ladder.bare_loop], naive), (ladder.padded, next(iter(ladder.padded), naive))):
        ran = [row for row in rows if row is not None]
        if ran:
            table.add_section()
        for row in ran:
            _add(table, _cells(row, base))
    return table


def as_table_of_each(ladder: Climbed) -> ReportTable | None:
    """Return a table of each rung alone on top of naive; None if they were not run."""
    table = ReportTable("each rung alone, on top of naive", _COLUMNS)
    for row in ladder.rungs:
        if row.alone is not None:
            cells = _cells(row.alone, ladder.rungs[0])
            _add(table, {**cells, "rung": row.title, "on this device": row.alone.error or ""})
    return table if table.rows else None


def as_table_of_finals(ladder: Climbed) -> ReportTable | None:
    """Return a table of the stacks and the baselines, each ratio of which is from the same turns, if they were run."""
    if not ladder.tops:
        return None
    ran = {row.name: row for row in ladder.finals if row.error is None}
    bases = [name for name in BASELINES if name in ran]
    columns = dict.fromkeys(("ms/step", "peak MiB", "÷ naive", *(f"× {name}" for name in bases)), "number")
    meanings = "; ".join(describe_baseline(ran[name]) for name in bases)
    notes = [f"{meanings}. {CLOCKS[ladder.clock]}. ×: times as fast, ± an interval of 95%. ÷: times less memory."]
    table = ReportTable("the stacks and the baselines, run in turn", {"state": "name", **columns}, notes)
    named = [(name, name) for name in bases]
    named += [(stacks, top["name"]) for stacks, top in name_stacks(ladder)]
    for shown, name in named:
        row = ran[name]
        cells = {"state": shown, "ms/step": four_digits(row.step_ms), "peak MiB": four_digits(row.peak_mib)}
        cells["÷ naive"] = f"{ran['naive'].peak_mib / row.peak_mib:.1f}"
        # A baseline is compared with the weaker ones.
        for base in bases[: bases.index(name)] if name in bases else bases:
            cells[f"× {base}"] = speed_of(compare_in_turn(row, ran[base]))
        table.add(*(cells.get(column, "") for column in table.headings))
    return table


def name_stacks(ladder: Climbed) -> list[tuple[str, dict[str, Any]]]:
    """Return the stacks with their names; of a state that is the best for several purposes, all of them.

    Example:
        >>> lean = {"name": "micro-batches"}
        >>> tops = {"fast": {"name": "bf16"}, "balanced": lean, "lean": lean}
        >>> [name for name, _ in name_stacks(Climbed({}, {}, "", "", {}, [], {}, tops=tops))]
        ['fast', 'balanced and lean']
    """
    names: dict[str, list[str]] = {}
    for stack, top in ladder.tops.items():
        names.setdefault(top["name"], []).append(stack)
    return [(" and ".join(stacks), ladder.tops[stacks[0]]) for stacks in names.values()]


def _add(table: ReportTable, cells: Mapping[str, str]) -> None:
    style = "dim" if cells["rung"].startswith("(") or "peak MiB" not in cells else ""
    table.add(*(cells.get(name, "") for name in table.headings), style=style)


def name_machine(ladder: Climbed) -> str:
    """Return the GPU, or the processor and its cores."""
    machine = ladder.hardware
    return machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"


def describe_baseline(row: Row) -> str:
    """Return what a baseline is called, and what it is."""
    return row.title if row.name == "naive" else f"{row.name}: {row.title}"


def as_line(row: Row) -> str:
    """Describe a finished row in one line.

    Example:
        >>> as_line(Row(title="bf16 mixed", peak_mib=800, ratio=[0.48, 0.5, 0.52], compared="naive", verdict="Less."))
        'bf16 mixed: 800.0 MiB, 2.00 ±0.08 times as fast as naive. Less.'
    """
    if row.error is not None:
        return f"{row.title}: failed: {row.error}"
    time = f"{four_digits(row.step_ms)} ms/step"
    if row.compared:
        time = f"{speed_of(ratio_of(row))} times as fast as {row.compared}"
    return f"{row.title}: {four_digits(row.peak_mib)} MiB, {time}. {row.verdict}".rstrip()


class Live:
    """Shows the running rung, and a line for each finished one; only these lines if the output is not a terminal.

    Args:
        console: where to.
        rows: number of rows of the climb.
    """

    def __init__(self, console: Console, rows: int) -> None:
        columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._task = self._bar.add_task("", total=rows)

    def __enter__(self) -> "Live":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def progress(self, title: str, message: Mapping[str, object]) -> None:
        """Show a message of a worker, or of the ladder, whose phases are ``"start"``, ``"turn"``, ``"round"``."""
        if message["phase"] != "timed":  # a turn of which is named already
            self._bar.update(self._task, description=f"{title}: {message['phase']} {message.get('step', '')}")

    def row(self, row: Row) -> None:
        """Print the line of a finished rung, and its notes."""
        self._bar.advance(self._task)
        self._say(as_line(row))
        notes = list(row.notes)
        if row.disturbed_cores:
            notes.append(f"other processes kept up to {row.disturbed_cores:.1f} cores busy")
        for note in notes:
            self._say(f"    {note}")

    def _say(self, line: str) -> None:
        for part in wrap(line, self._console.width, hanging="    "):
            self._console.print(part, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def _cells(row: Row, naive: Row) -> dict[str, str]:
    """Return column → text; columns for which a failed rung has no value are missing."""
    in_chain = row.carried or row.host == "bare" or row.name in ("padded", "trimmed")
    cells = {
        "rung": row.title if in_chain else f"({row.title})",
        "on this device": row.verdict,
    }
    if row.error is not None:
        return {**cells, "× below": "failed"}
    if row.ratio:
        cells["× below"] = speed_of(ratio_of(row))
    if row.max_loss_delta is not None:
        cells["max |Δloss|"] = f"{row.max_loss_delta:.0e}"
    return {**cells, "peak MiB": four_digits(row.peak_mib), "÷ naive": f"{naive.peak_mib / row.peak_mib:.2f}"}


def speed_of(time: Ratio) -> str:
    """Format how many times as fast a state is as another, by the ratio of their times.

    Example:
        >>> speed_of(Ratio(0.5, 0.49, 0.51)), speed_of(Ratio(0.8, 0.0, math.inf))
        ('2.00 ±0.04', '1.25')
    """
    speed = 1 / time.value
    return f"{speed:.2f} ±{speed * time.plus_minus:.2f}" if math.isfinite(time.high) else f"{speed:.2f}"


def four_digits(number: float) -> str:
    """Format so that quotients of printed numbers are those of the measured ones, also of very short steps."""
    decimals = sum(number < limit for limit in (10, 100, 1000))
    return f"{number:,.{decimals}f}"


def summary(ladder: Climbed, width: int) -> str:
    """Describe the stacks, each with its code, and the failures and disturbances of this run.

    Args:
        ladder: what ``ladder.json`` holds.
        width: of the terminal; code is not wrapped, since it is to be pasted.
    """
    parts: list[str] = []
    for name, top in name_stacks(ladder):
        parts += [*wrap(_describe_top(name, top), width), top["code"], ""]
    notes = [describe_limit(ladder)] if ladder.tops else ["Too little was measured for a stack."]
    rows = [*ladder.rungs, *ladder.padded, *ladder.finals]
    rows += [ladder.bare_loop] if ladder.bare_loop else []
    cores = [row.disturbed_cores for row in rows if row.disturbed_cores]
    if cores:
        others = f"Other processes kept up to {max(cores):.1f} cores busy"
        notes.append(f"{others} during {len(cores)} of {len(rows)} runs: their intervals are wider for it.")
    notes += [f"Failed: {row.title}: {row.error.rstrip('.')}." for row in rows if row.error is not None]
    for note in filter(None, notes):
        parts += wrap(note, width)
    return "\n".join(parts)


def _describe_top(name: str, top: dict[str, Any]) -> str:
    against = []
    for base, found in top["against"].items():
        speed = f"{found['speedup']:.2f} ±{found['speedup'] * found['plus_minus']:.2f}"
        against.append(f"{speed} times as fast as {base}, in {found['memory_ratio']:.1f} times less memory")
    return f"{name}, up to “{top['title']}”: {'; '.join(against)}."


def describe_limit(ladder: Climbed) -> str:
    """Describe what the fast stack's matrix products take of its step; empty if they were not run."""
    ran = {row.name: row for row in ladder.finals if row.error is None}
    if "fast" not in ladder.tops or "products" not in ran:
        return ""
    share = compare_in_turn(ran["products"], ran[ladder.tops["fast"]["name"]])
    interval = f"{share.value:.0%} ±{share.value * share.plus_minus:.0%}"
    return (
        f"The matrix products and the attention of a step alone take {interval} of the fast stack's time: no training "
        f"with them could be over {1 / share.value:.2f} times as fast."
    )
