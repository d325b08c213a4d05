"""Techniques that are not in use, and why: for people and for programs."""

from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_fasttrain.core.messages import format_bytes


@dataclass(frozen=True)
class Unused:
    """One technique.

    Args:
        name: of its class.
        why_not: why it cannot, or need not, act here; None if nothing speaks against trying it.
        when: when it pays, anywhere.
        tried: as what it was predicted, a call; "" if it was not.
        factor: the predicted peak with it, as a factor of that without; None if it was not predicted.
    """

    name: str
    why_not: str | None
    when: str
    tried: str = ""
    factor: float | None = None


@dataclass(frozen=True)
class UnusedReport:
    """Techniques that are not in use; ``print`` shows a table.

    Args:
        rows: first what may be worth trying, by how much memory it would save, then what is not.
        used: names of the techniques in use.
        peak_bytes: the predicted peak with those; None if nothing was predicted.
        device: that it is about.
        precision: as Lightning means it.
        notes: sentences on what was not predicted.
    """

    rows: tuple[Unused, ...]
    used: tuple[str, ...]
    peak_bytes: int | None
    device: str
    precision: str
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, in bytes, for JSON."""
        return asdict(self)

    def as_table(self) -> Table:
        """For ``rich``: what each would bring, and what speaks against it."""
        peak = "" if self.peak_bytes is None else f", predicted peak {format_bytes(self.peak_bytes)}"
        table = Table(
            title=f"Not in use on {self.device}, {self.precision}; in use: {', '.join(self.used) or 'nothing'}{peak}",
            caption="\n".join(self.notes) or None,
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("technique")
        table.add_column("peak", justify="right")
        table.add_column("why not, or when it pays", overflow="fold")
        for row in self.rows:
            factor = "" if row.factor is None else f"×{row.factor:.2f}"
            says = f"pays when {row.when}" if row.why_not is None else row.why_not
            style = "dim" if row.why_not is not None else None
            table.add_row(row.tried or row.name, factor, says, style=style)
        return table

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=120).print(self.as_table())
        return text.getvalue().rstrip()
