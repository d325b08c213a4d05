"""Messages: errors in three parts, one class of warning, notes that appear once, reports, and formats."""

import functools
import itertools
import logging
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

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


class _StderrHandler(logging.Handler):
    """Writes to what is ``sys.stderr`` at that moment, since progress bars replace it; to a terminal in whole words."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        try:
            text = self.format(record)
            if stream.isatty():
                text = "\n".join(wrap(text, output_width()))
            stream.write(f"{text}\n")
            stream.flush()
        except Exception:  # as all handlers do: a line that cannot be written must not end a run
            self.handleError(record)


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
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
    log.info(message, *values)


_THEIR_OWN = ("torchao", "bitsandbytes", "torch.utils._pytree", "torch._subclasses.fake_tensor")


@contextmanager
def quiet_libraries(*more: str) -> Iterator[None]:
    """Keep lines of other libraries about themselves from the terminal: missing extensions, deprecations, traces.

    Args:
        more: names of further loggers.
    """
    loggers = [logging.getLogger(name) for name in (*_THEIR_OWN, *more)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # in Lightning, of torch
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


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


def output_width() -> int:
    """Return the columns of the terminal that stdout is, or the number in ``COLUMNS``; 120 for a file or a pipe."""
    return shutil.get_terminal_size((120, 24)).columns


def wrap(text: str, width: int, indent: str = "", hanging: str = "  ") -> list[str]:
    """Break text at spaces into lines; a word is broken only if it is longer than a line.

    Args:
        text: one paragraph, or several with newlines between them; spaces at the start of one are kept.
        width: columns of a line, with its indent.
        indent: before every line.
        hanging: before every line of a paragraph but its first, besides ``indent``.

    Example:
        >>> wrap("bf16 takes less time", 12, hanging="  ")
        ['bf16 takes', '  less time']
    """
    lines: list[str] = []
    for paragraph in text.splitlines():
        own = indent + paragraph[: len(paragraph) - len(paragraph.lstrip())]
        broken = textwrap.wrap(
            paragraph.strip(), width, initial_indent=own, subsequent_indent=own + hanging, break_on_hyphens=False
        )
        lines += broken
    return lines


_KINDS = ("name", "number", "prose")
_LEAST_PROSE = 30  # columns in which sentences can be read
_GAP = 2
_MARGIN = 4  # of a wrapped name: its own indent, and that of its further lines


class ReportTable:
    """A table that is laid out for the width in which it is printed; rich and ``str`` print it.

    Sentences are wrapped, in no less than 30 columns; where there are fewer, they move below their row. Where the rest
    does not fit either, names in the first column are broken at spaces, and then other columns move below, the last
    ones first. Nothing is cut; a column without any text is left out.

    Args:
        title: a line above the table.
        columns: heading → kind: "name", aligned at the left; "number", at the right; "prose", sentences, which are
            understood without their heading.
        notes: lines below the table.

    Example:
        >>> table = ReportTable("2 rungs", {"rung": "name", "ms": "number", "verdict": "prose"})
        >>> table.add("bf16", "50.1", "Needs as much memory and 2.0 times less time.")
        >>> table.add("fused AdamW", "49.8", "Needs as much of both.")
        >>> print(table.as_text(36))
        2 rungs
        rung           ms
        ─────────────────
        bf16         50.1
            Needs as much memory and 2.0
              times less time.
        fused AdamW  49.8
            Needs as much of both.
    """

    def __init__(self, title: str, columns: Mapping[str, str], notes: Iterable[str] = ()) -> None:
        self.title, self.headings, self.kinds, self.notes = title, list(columns), list(columns.values()), list(notes)
        assert set(self.kinds) <= set(_KINDS), self.kinds
        self.rows: list[tuple[list[list[str]], str]] = []

    def add(self, *cells: str, style: str = "") -> None:
        """Add a row, with a line of a cell for each line of its text; ``style`` is that of rich."""
        assert len(cells) == len(self.headings), cells
        self.rows.append(([cell.splitlines() for cell in cells], style))

    def add_section(self) -> None:
        """Leave an empty line before the next row."""
        self.rows.append(([], ""))

    def as_text(self, width: int) -> str:
        """Return the table in lines of at most ``width`` columns."""
        return "\n".join(line for line, _ in self._lines(width))

    def __repr__(self) -> str:
        return self.as_text(output_width())

    def print(self) -> None:
        """Print the table on stdout, with styles if that is a terminal."""
        from rich.console import Console
        from rich.text import Text

        console = Console()
        for line, style in self._lines(output_width()):
            # The lines have their width: rich assumes 80 columns where TERM is "dumb", whatever COLUMNS says.
            console.print(Text(line, style=style), soft_wrap=True)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Text]":
        from rich.text import Text

        for line, style in self._lines(options.max_width):
            yield Text(line, style=style, no_wrap=True, overflow="ignore")

    def _lines(self, width: int) -> Iterator[tuple[str, str]]:
        """Yield each line with its style."""
        for line in wrap(self.title, width):
            yield line, "bold"
        widths = self._fit(width)
        heads = [[self.headings[column]] for column in range(len(self.headings))]
        for line in self._side_by_side(heads, widths):
            yield line, "bold"
        yield "─" * (sum(widths.values()) + _GAP * (len(widths) - 1)), ""
        for cells, style in self.rows:
            for line in self._row(cells, widths, width) if cells else [""]:
                yield line, style
        if self.notes:
            yield "", ""
        for note in self.notes:
            for line in wrap(note, width):
                yield line, "italic"

    def _row(self, cells: list[list[str]], widths: dict[int, int], width: int) -> Iterator[str]:
        yield from self._side_by_side(cells, widths)
        facts, sentences = [], []
        for column, lines in enumerate(cells):
            if column in widths or not lines:
                continue
            if self.kinds[column] == "prose":
                sentences += lines
            else:
                facts.append(f"{self.headings[column]}: {', '.join(lines)}")
        for text in ["; ".join(facts), *sentences]:
            yield from wrap(text, width, indent="    ")

    def _side_by_side(self, cells: Sequence[list[str]], widths: dict[int, int]) -> Iterator[str]:
        columns = []
        for column, size in widths.items():
            align = str.rjust if self.kinds[column] == "number" else str.ljust
            lines = wrap("\n".join(cells[column]), size, hanging="  " if column == 0 else "")
            columns.append([align(line, size) for line in lines])
        for line in itertools.zip_longest(*columns):
            padded = [text or " " * size for text, size in zip(line, widths.values(), strict=True)]
            yield (" " * _GAP).join(padded).rstrip()

    def _fit(self, width: int) -> dict[int, int]:
        """Return the widths of the columns that stand side by side: moves columns until the others fit."""
        inside = [column for column in range(len(self.headings)) if column == 0 or any(self._lines_of(column))]
        while len(inside) > 1:
            # A heading is broken at spaces before a column is moved.
            for broken in (False, True):
                widths = self._share(inside, width, broken)
                if widths is not None:
                    return widths
            prose = [column for column in inside if self.kinds[column] == "prose"]
            inside.remove(prose[-1] if prose else inside[-1])
        return {0: min(width, max(map(len, [self.headings[0], *self._lines_of(0)])))}

    def _lines_of(self, column: int) -> list[str]:
        return [line for cells, _ in self.rows if cells for line in cells[column]]

    def _share(self, inside: list[int], width: int, broken: bool) -> dict[int, int] | None:
        """Return the widths of columns side by side, where sentences, or else names, are wrapped; None if too few."""
        widths, least = {}, {}
        wrapped = [column for column in inside if self.kinds[column] == "prose"] or [0]
        for column in inside:
            lines, heading = self._lines_of(column), [self.headings[column]]
            if broken:
                heading = self.headings[column].split()
            widths[column] = max(map(len, [*heading, *lines]), default=0)
            if column in wrapped:
                longest = max((len(word) for line in lines for word in line.split()), default=0)
                least[column] = min(widths[column], max(_LEAST_PROSE, longest + _MARGIN))
        spare = width - _GAP * (len(inside) - 1) - sum({**widths, **least}.values())
        if spare < 0:
            return None
        # Each gets an equal share of what is left, the narrow ones first, since they may not need it.
        for place, column in enumerate(sorted(least, key=lambda column: widths[column] - least[column])):
            more = min(widths[column] - least[column], spare // (len(least) - place))
            widths[column] = least[column] + more
            spare -= more
        return widths


class Report:
    """Base class of dataclasses that print as a table, and are plain values for programs."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; sizes are in bytes."""
        return asdict(self)

    def as_table(self) -> ReportTable:
        """Build the table, which is laid out for the width in which it is printed."""
        raise NotImplementedError

    def __rich__(self) -> ReportTable:
        return self.as_table()

    def __str__(self) -> str:
        return str(self.as_table())
