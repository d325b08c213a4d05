"""Live progress of the ladder: a bar for the run, a line for each rung that is done."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_fasttrain.bench.ladder.report import as_line
from lightning_fasttrain.bench.ladder.results import Row


class Live:
    """Shows what is running. Where the output is no terminal there are only the lines of finished rungs, as they come.

    Args:
        console: where to.
        rows: number of rungs and baselines.
    """

    def __init__(self, console: Console, rows: int) -> None:
        columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._task = self._bar.add_task("", total=rows)
        self._naive: Row | None = None

    def __enter__(self) -> "Live":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def progress(self, title: str, message: dict[str, Any]) -> None:
        """One message of a worker, or ``{"phase": "start", "run": number}`` before the first."""
        if message["phase"] == "start":
            again = f", run {message['run']}" if message["run"] > 1 else ""
            self._bar.update(self._task, description=f"{title}{again}: starting")
            return
        step = f"{message['phase']} {message['step']}/{message['steps']}"
        self._bar.update(self._task, description=f"{title}: {step}")

    def row(self, row: Row) -> None:
        """One finished rung."""
        self._bar.advance(self._task)
        self._naive = self._naive or row
        self._say(as_line(row, self._naive))
        notes = list(row.notes)
        if row.disturbed_cores:
            notes.append(f"other processes kept {row.disturbed_cores:.1f} cores busy: do not trust this time")
        for note in notes:
            self._say(f"    {note}")

    def _say(self, line: str) -> None:
        # No wrapping: a pipe gets whole lines, a terminal folds them itself.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()
