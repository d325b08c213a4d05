"""What subcommands share: the model that is asked about, and how they refuse."""

import argparse
import sys
from typing import Any, Protocol

# Also the exit code for arguments that argparse itself refuses.
BAD_INPUT = 2


class Commands(Protocol):
    """What ``argparse`` returns where subcommands are added, as far as they ask for it."""

    def add_parser(self, name: str, *, help: str, description: str = "") -> argparse.ArgumentParser: ...


def refuse(command: str, reason: object) -> int:
    """Say in one line on stderr why ``command`` is not run; returns the exit code."""
    print(f"fasttrain {command}: {reason}", file=sys.stderr)
    return BAD_INPUT


def add_target(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take a model by its import path, or a reference GPT by its size."""
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
    parser.add_argument("--size", help="a reference GPT instead: nano, tiny, mini, gpt2-small, gpt2-medium or gpt2-xl")


def load_target(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, with its memory, and a batch, as the options name them.

    Raises:
        ValueError, TypeError: there is none, or it cannot be had.
    """
    from lightning_fasttrain._checks import positive_int
    from lightning_fasttrain.bench import zoo
    from lightning_fasttrain.plan.subject import load_subject

    if (options.target is None) == (options.size is None):
        raise ValueError("give either TARGET or --size, see --help.")
    if options.size is None:
        return load_subject(options.target, options.arg, fake=False)
    specimen = zoo.gpt(options.size, positive_int("batch", 4 if options.batch is None else options.batch))
    return specimen.module(), specimen.batch()
