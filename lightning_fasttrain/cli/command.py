"""Share among subcommands: their rows, errors in one line, options that name a model, and the printing of reports."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# For annotations only: the command must answer --help without importing torch.
if TYPE_CHECKING:
    from rich.status import Status
    from torch import nn

    from lightning_fasttrain.bench.gpt import Specimen
    from lightning_fasttrain.core.messages import Report

# Also the exit code for arguments that argparse itself refuses.
BAD_INPUT = 2
USUAL_BATCH = 4  # sequences of a reference GPT that is run here

Option = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A subcommand of ``fasttrain``.

    Attributes:
        name: the word after ``fasttrain``.
        help: its line in the list of commands.
        options: its arguments, made by :func:`option`.
        run: what it does with them; returns the exit code, None for 0.
        description: what ``--help`` says above the options.
    """

    name: str
    help: str
    options: Sequence[Option]
    run: Callable[[argparse.Namespace], int | None]
    description: str = ""


def option(*names: str, **settings: object) -> Option:
    """Keep the arguments of ``add_argument`` until there is a parser."""
    return names, settings


class CommandError(Exception):
    """Ends a command with a reason, which is printed in one line, and an exit code."""

    def __init__(self, reason: object, code: int = BAD_INPUT) -> None:
        super().__init__(str(reason))
        self.code = code


@contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """End the command as for bad input if one of these errors is raised."""
    try:
        yield
    except errors as error:
        raise CommandError(error) from error


@contextmanager
def working(says: str) -> Iterator["Status"]:
    """Show on stderr what is being done, as stdout has the report alone; errors about the input end the command."""
    from rich.console import Console

    # Other errors are faults of the model or of this package, and keep their traceback.
    with refusing(ValueError, TypeError, ModuleNotFoundError), Console(stderr=True).status(says) as status:
        yield status


def show_report(report: "Report", in_json: bool) -> None:
    """Print a report as a table or as JSON."""
    if in_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        report.as_table().print()


def note(text: object) -> None:
    """Print a line on stderr, beside the report on stdout."""
    print(text, file=sys.stderr)


def model_options(batch: str) -> list[Option]:
    """Options that name a model by its import path, or a reference GPT by its size; ``batch`` is the help of that."""
    return [
        option(
            "target",
            nargs="?",
            metavar="TARGET",
            help="package.module:Name of a LightningModule with a train_dataloader, or of a function that returns "
            "(module, batch)",
        ),
        option("--arg", action="append", default=[], metavar="KEY=VALUE", help="an argument for TARGET, repeatable"),
        option(
            "--data", default="", metavar="TARGET", help="package.module:Name of a LightningDataModule, for its batches"
        ),
        option("--size", help="a reference GPT instead: nano, tiny, mini, gpt2-small, gpt2-medium or gpt2-xl"),
        option("--hf", metavar="FOLDER", help="a Hugging Face model of tokens instead: a folder with its config.json"),
        option("--batch", type=int, metavar="N", help=batch),
        option("--length", type=int, metavar="N", help="with --hf: tokens of a sequence; default: at most 2048"),
    ]


def load_model(options: argparse.Namespace) -> "tuple[nn.Module, Any]":
    """Return the model, with its memory, and a batch, as the options name them.

    Raises:
        ValueError, TypeError: there is none, or it cannot be had.
    """
    from lightning_fasttrain.cli.subject import load_hugging_face, load_subject, refuse_too_large

    _refuse_several_or_none(options)
    if options.hf is not None:
        make, batch = load_hugging_face(options.hf, options.batch, options.length)
        refuse_too_large(f"--hf {options.hf}", make)
        return make(), batch
    if options.size is None:
        return load_subject(options.target, options.arg, data=options.data, fake=False)
    specimen = _reference(options, USUAL_BATCH)
    refuse_too_large(f"--size {options.size}", specimen.module)
    return specimen.module(), specimen.batch()


def load_model_without_memory(options: argparse.Namespace, usual_batch: int | None = None) -> tuple[Any, Any]:
    """Return the model, or its factory, without memory, and a batch; of a reference GPT by default the size's own.

    Args:
        options: those of :func:`model_options`.
        usual_batch: sequences of a reference GPT's batch where ``--batch`` is not given, in place of the size's own.

    Raises:
        ValueError, TypeError: there is none, or it cannot be had.
    """
    from lightning_fasttrain.bench.gpt import size_named
    from lightning_fasttrain.cli.subject import load_hugging_face, load_subject

    _refuse_several_or_none(options)
    if options.hf is not None:
        return load_hugging_face(options.hf, options.batch, options.length)
    if options.size is None:
        return load_subject(options.target, options.arg, data=options.data)
    specimen = _reference(options, usual_batch or size_named(options.size).batch)
    return specimen.module, specimen.batch()


def _refuse_several_or_none(options: argparse.Namespace) -> None:
    given = [each for each in (options.target, options.size, options.hf) if each is not None]
    if len(given) != 1:
        raise ValueError("give one of TARGET, --size and --hf, see --help.")
    if options.data and options.target is None:
        raise ValueError("--data names batches for TARGET; other models have their own. Give TARGET.")
    if options.length is not None and options.hf is None:
        raise ValueError("--length goes with --hf; TARGET and --size have their own batches. Leave it out.")


def _reference(options: argparse.Namespace, usual_batch: int) -> "Specimen":
    from lightning_fasttrain.bench.gpt import reference_gpt
    from lightning_fasttrain.core.checks import positive_int

    batch = usual_batch if options.batch is None else options.batch
    return reference_gpt(options.size, positive_int("batch", batch))
