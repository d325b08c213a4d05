"""Share among subcommands: options that name a model, refusals, and the printing of reports."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

# Also the exit code for arguments that argparse itself refuses.
BAD_INPUT = 2


class Commands(Protocol):
    """The part of ``argparse``'s subparsers that the subcommands use."""

    def add_parser(self, name: str, *, help: str, description: str = "") -> argparse.ArgumentParser: ...


def refuse(command: str, reason: object) -> int:
    """Say in one line on stderr why ``command`` is not run; returns the exit code."""
    print(f"fasttrain {command}: {reason}", file=sys.stderr)
    return BAD_INPUT


def add_target(parser: argparse.ArgumentParser, batch: str) -> None:
    """Let ``parser`` take a model by its import path, or a reference GPT by its size; ``batch`` is the help for it."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="package.module:Name of a LightningModule with a train_dataloader, or of a function that returns "
        "(module, batch)",
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="an argument for TARGET, may be repeated"
    )
    parser.add_argument(
        "--data", default="", metavar="TARGET", help="package.module:Name of a LightningDataModule, for its batches"
    )
    parser.add_argument("--size", help="a reference GPT instead: nano, tiny, mini, gpt2-small, gpt2-medium or gpt2-xl")
    parser.add_argument("--batch", type=int, metavar="N", help=batch)


def load_target(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, with its memory, and a batch, as the options name them.

    Raises:
        ValueError, TypeError: there is none, or it cannot be had.
    """
    from lightning_fasttrain.cli.subject import load_subject

    _refuse_both_or_none(options)
    if options.size is None:
        return load_subject(options.target, options.arg, data=options.data, fake=False)
    specimen = _reference(options.size, 4 if options.batch is None else options.batch)
    return specimen.module(), specimen.batch()


def load_target_without_memory(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, or what makes it, without its memory, and a batch; of a reference GPT by default the size's own.

    Raises:
        ValueError, TypeError: there is none, or it cannot be had.
    """
    from lightning_fasttrain.bench.gpt import size_named
    from lightning_fasttrain.cli.subject import load_subject

    _refuse_both_or_none(options)
    if options.size is None:
        return load_subject(options.target, options.arg, data=options.data)
    specimen = _reference(options.size, size_named(options.size).batch if options.batch is None else options.batch)
    return specimen.module, specimen.batch()


def _refuse_both_or_none(options: argparse.Namespace) -> None:
    if (options.target is None) == (options.size is None):
        raise ValueError("give either TARGET or --size, see --help.")
    if options.data and options.target is None:
        raise ValueError("--data names batches for TARGET; a reference GPT has its own. Give TARGET instead of --size.")


def _reference(size: str, batch: int) -> Any:
    from lightning_fasttrain.bench import reference_models
    from lightning_fasttrain.core.checks import positive_int

    return reference_models.gpt(size, positive_int("batch", batch))


class Report(Protocol):
    """A report that a subcommand prints."""

    def as_dict(self) -> dict[str, Any]: ...

    def as_table(self) -> Any: ...


Found = TypeVar("Found", bound=Report)


def find_report(command: str, says: str, find: Callable[["Status"], Found]) -> Found | None:
    """Run ``find`` while a line on stderr ``says`` so; None where it refuses, which is then said."""
    from rich.console import Console

    try:
        with Console(stderr=True).status(says) as status:  # stdout has the report alone
            return find(status)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        refuse(command, error)
        return None


def show_report(report: Report, in_json: bool) -> "Console":
    """Print it; returns what more can be printed on."""
    from rich.console import Console

    from lightning_fasttrain.core.messages import wide_enough

    console = wide_enough(Console())
    if in_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        console.print(report.as_table())
    return console
