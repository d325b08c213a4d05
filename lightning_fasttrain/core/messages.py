"""Messages: errors in three parts, one class of warning, notes that appear once, reports, and formats."""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import StringIO
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
FULL_WIDTH = 190  # columns that the widest of our tables fits in

log = logging.getLogger("lightning_fasttrain")


class FastTrainWarning(UserWarning):
    """Something asked for does not, or only partly, take effect. The message says why and what to do."""


def explain(what: str, why: str, way_out: str) -> str:
    """Format an error message in our one form: what was wrong, with its value · why · the cheapest way out.

    Example:
        >>> explain("n=0", "a batch has at least one part", "Use n=1")
        'n=0: a batch has at least one part. Use n=1.'
    """
    return f"{what}: {why}. {way_out}."


def list_some(names: Sequence[str], most: int = 3) -> str:
    """The first of the names, and how many more there are.

    Example:
        >>> list_some(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without the advice and the C++ frames that may follow."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def describe_error(error: BaseException) -> str:
    """Return the class of an error and its first line; of a compiler's, the line that its back end raised.

    Example:
        >>> describe_error(ValueError("no such layer.\\nAdvice"))
        'ValueError: no such layer'
    """
    # The errors of torch.compile keep in inner_exception what its back end raised.
    cause = error.__cause__ or getattr(error, "inner_exception", None) or error
    return f"{type(error).__name__}: {first_line(cause).strip()}".rstrip(".")


def _rank() -> int:
    """Return the rank that Lightning knows; this file is also used where nothing has imported Lightning."""
    host = sys.modules.get("lightning.fabric.utilities.rank_zero")
    return 0 if host is None else host.rank_zero_only.rank or 0


def say(message: str, *values: object) -> None:
    """Log one line at INFO, on rank zero only, where it can be seen.

    Python shows no INFO by default. So unless this package's logger was given a level it is set to INFO, and unless
    the program has handlers one that writes to stderr is added to it, at the first line rather than at import.
    """
    if _rank():
        return
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
    log.info(message, *values)


def warn(message: str) -> None:
    """Warn once per place, on rank zero only."""
    if not _rank():
        warnings.warn(message, FastTrainWarning, stacklevel=2)


def warn_on_any_rank(message: str) -> None:
    """Warn once per place, on the rank where it happens, with its number: the first rank may know nothing of it."""
    rank = _rank()
    warnings.warn(f"rank {rank}: {message}" if rank else message, FastTrainWarning, stacklevel=2)


def write_to_stderr(text: str) -> None:
    """Write to stderr at once, bypassing a replaced ``sys.stderr``, so that the output of ranks does not mix."""
    data = text.encode(errors="replace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def note_once(message: str) -> None:
    """Say something that is worth knowing but no reason to worry, once per process; unheard, it may come again."""
    if log.level <= logging.INFO:
        say_once(message)


@functools.cache
def say_once(message: str) -> None:
    """Log a note as :func:`say` does, once per process."""
    say(message)


def wide_enough(console: Console) -> Console:
    """The console, or a wider one where the output goes to a file or a pipe and nothing is cut by a screen."""
    return console if console.is_terminal else Console(width=FULL_WIDTH)


def format_bytes(nbytes: float) -> str:
    """Bytes for people: GiB, or MiB and KiB where it is less than one.

    Example:
        >>> format_bytes(3 * 2**30), format_bytes(1536), format_bytes(7)
        ('3.00 GiB', '1.50 KiB', '7 B')
    """
    for unit, size in UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_ms(ms: float) -> str:
    """Format milliseconds with three significant digits, and never as a power of ten.

    Example:
        >>> format_ms(7051.2), format_ms(40.123), format_ms(0.0386)
        ('7,051', '40.1', '0.0386')
    """
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def number_of(count: int, thing: str, things: str = "") -> str:
    """A number and what is counted.

    Example:
        >>> number_of(1, "rank"), number_of(1200, "rank"), number_of(2, "batch", "batches")
        ('1 rank', '1,200 ranks', '2 batches')
    """
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"


def align(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Format labelled facts, one a line, with the facts in one column.

    Example:
        >>> print(align("2 steps", [("Time", "12 ms/step"), ("Peak memory", "1.50 GiB")]))
        2 steps
          Time         12 ms/step
          Peak memory  1.50 GiB
    """
    listed = list(rows)
    width = max([len(label) for label, _ in listed], default=0)
    return "\n".join([title, *[f"  {label:<{width}}  {fact}" for label, fact in listed]])


class Report:
    """Base class of dataclasses that print as a table, and are plain values for programs.

    Attributes:
        width: columns of the table when it is printed.
    """

    width: ClassVar[int] = 120
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; sizes are in bytes."""
        return asdict(self)

    def as_table(self) -> Table:
        """Build a ``rich`` table."""
        raise NotImplementedError

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=self.width).print(self.as_table())
        return text.getvalue().rstrip()


def titled_table(title: str, notes: Iterable[str] = ()) -> Table:
    """Return an empty table with a title above it and ``notes`` below it, one a line."""
    return Table(title=title, caption="\n".join(notes) or None, title_justify="left", caption_justify="left")
