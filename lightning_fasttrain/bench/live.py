"""Live progress of the ladder: a bar for the run, a line for each rung that is done."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Live:
    """Shows what is running. Where the output is no terminal there are only the lines of finished rungs.

    Args:
        console: where to.
        runs: number of processes the ladder will start, as far as is known.
    """

    def __init__(self, console: Console, runs: int) -> None:
        columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._task = self._bar.add_task("", total=runs)
        self._started = 0

    def __enter__(self) -> "Live":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def progress(self, title: str, line: dict[str, Any]) -> None:
        """One line of a worker's progress, or ``{"phase": "start"}`` before the first."""
        if line.get("phase") == "start":
            self._bar.update(self._task, completed=self._started, description=f"{title}: starting")
            self._started += 1
            return
        loss = f", loss {line['loss']:.4f}" if "loss" in line else ""
        step = f"{line.get('phase')} {line.get('step')}/{line.get('steps')}"
        self._bar.update(self._task, description=f"{title}: {step}{loss}")

    def row(self, row: dict[str, Any]) -> None:
        """One finished rung."""
        if row["error"] is not None:
            text = f"failed: {row['error']}"
        else:
            text = f"{row['step_ms']:9,.1f} ms/step {row['peak_mib']:9,.1f} MiB   {row['verdict']}"
        self._console.print(f"{row['title']:<38} {text}", markup=False, highlight=False, soft_wrap=True)
        notes: list[str] = [*row.get("notes", ())]
        if row.get("disturbed_cores"):
            notes.append(f"other processes kept {row['disturbed_cores']:.1f} cores busy: do not trust this time")
        for note in notes:
            self._console.print(f"    {note}", markup=False, highlight=False, soft_wrap=True)
