"""The ``fasttrain`` command. What is heavy is imported by the subcommand that needs it."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_fasttrain.cli import memory, plan, schedule, shard, verify, why_not
from lightning_fasttrain.cli.rehearsal import rehearse
from lightning_fasttrain.cli.target import BAD_INPUT, Commands, refuse
from lightning_fasttrain.core.package import __version__

INTERRUPTED = 130  # what shells give for a program that SIGINT ended: 128 + 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage of ten options above it hides the reason."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 if the job failed, 2 for bad input.
    """
    parser = _Parser(prog="fasttrain", description="Train Lightning models faster and in less memory, with proof.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_ladder(commands)
    memory.add(commands)
    verify.add(commands)
    rehearse.add(commands)
    plan.add(commands)
    why_not.add(commands)
    schedule.add(commands)
    shard.add(commands)
    _add_consolidate(commands)
    _add_doctor(commands)
    _add_techniques(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("fasttrain: interrupted", file=sys.stderr)
        return INTERRUPTED


def _add_ladder(commands: Commands) -> None:
    parser = commands.add_parser(
        "ladder",
        help="measure on this machine what each technique gains",
        description="Train a reference GPT on real text, with one optimisation after the other; "
        "print a table, write ladder.json and ladder.png.",
    )
    parser.add_argument("--size", default="mini", help="nano, tiny, mini (default), gpt2-small, gpt2-medium or gpt2-xl")
    parser.add_argument("--text", metavar="PATH", help="file or folder; default: source of Python's standard library")
    parser.add_argument("--out", metavar="DIR", default="ladder", help="folder for the results; default: ladder")
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps per rung; default: the size's own")
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        default=2,
        help="how often rungs whose times are too near to decide are run again, in turn; default: 2",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="run nothing again after; default: the size's own")
    parser.add_argument("--each", action="store_true", help="also run each rung alone")
    parser.add_argument("--attention", default="sdpa", help="sdpa (default) or naive, in every rung")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences per step; default: the size's own")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="parts of a batch; default: the size's own")
    parser.add_argument("--rungs", metavar="A,B,C", help="only these, a wrong name lists them; default: all")
    parser.set_defaults(run=_ladder)


def _ladder(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lightning_fasttrain.bench.ladder import preflight, report, run_ladder
    from lightning_fasttrain.bench.ladder.progress import Live
    from lightning_fasttrain.core.messages import wide_enough

    console = wide_enough(Console())
    names = None
    if options.rungs:
        names = [name.strip() for name in options.rungs.split(",")]
    try:
        prepared = preflight.prepare(
            options.size,
            text=options.text,
            out=options.out,
            steps=options.steps,
            repeats=options.repeats,
            minutes=options.minutes,
            each=options.each,
            attention=options.attention,
            batch=options.batch,
            micro_batches=options.micro_batches,
            names=names,
        )
    except (ValueError, ModuleNotFoundError) as error:
        return refuse("ladder", error)
    for one in prepared.skipped:
        console.print(f"{one.title:<28} left out: {one.reason}", markup=False, highlight=False, soft_wrap=True)
    with Live(console, run_ladder.number_of_rows(prepared)) as live:
        result = run_ladder.climb(prepared, live.row, live.progress)
    if not result.rungs:  # interrupted before the first one was done
        return INTERRUPTED
    console.print(report.as_table(result, console.width))
    each = report.as_table_of_each(result)
    if each is not None:
        console.print(each)
    console.print(report.summary(result), markup=False, highlight=False, soft_wrap=True)
    picture = report.save_picture(result, prepared.out / "ladder.png")
    written = [str(prepared.out / "ladder.json"), *([str(picture)] if picture else [])]
    console.print(f"Written: {', '.join(written)}", soft_wrap=True)
    if picture is None:
        # The backslash keeps rich from reading [plots] as a style.
        console.print("No picture: matplotlib is missing. pip install 'lightning-fasttrain\\[plots]'")
    if result.interrupted:
        print("fasttrain ladder: interrupted; what was measured is kept", file=sys.stderr)
        return INTERRUPTED
    naive, *others = result.rungs
    # Without naive and at least one rung there is nothing to compare.
    worked = naive.error is None and any(row.error is None for row in others)
    return 0 if worked else 1


def _add_consolidate(commands: Commands) -> None:
    parser = commands.add_parser(
        "consolidate",
        help="write the whole weights of a sharded checkpoint to one file",
        description="Write the float32 weights of a checkpoint of ZeRO or FSDP2 to one safetensors file, with the "
        "keys of the plain model.",
    )
    parser.add_argument("folder", metavar="DIR", help="the checkpoint, a folder")
    parser.add_argument("--out", metavar="FILE", help="file to write; default: DIR.safetensors, beside it")
    parser.set_defaults(run=_consolidate)


def _consolidate(options: argparse.Namespace) -> int:
    from pathlib import Path

    from lightning_fasttrain.core.messages import format_bytes
    from lightning_fasttrain.strategy.consolidate import consolidate

    folder = Path(options.folder)
    # Resolved, since "." has no name that could get a suffix.
    out = Path(options.out) if options.out else Path(f"{str(folder.resolve()).removesuffix('.ckpt')}.safetensors")
    try:
        written = consolidate(folder, out)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        return refuse("consolidate", " ".join(str(error).split()))  # torch's errors have many lines; a refusal is one
    size = format_bytes(written.nbytes)
    print(
        f"Written: {written.path}, {written.tensors} tensors, {written.numel:,} numbers, {size}, from {written.source}"
    )
    return 0


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="what this machine offers, and how to get what is missing")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lightning_fasttrain.cli import doctor
    from lightning_fasttrain.core.messages import wide_enough

    wide_enough(Console()).print(doctor.as_table(doctor.examine()))
    return 0


def _add_techniques(commands: Commands) -> None:
    parser = commands.add_parser("techniques", help="the table of techniques, as Markdown, or all about one of them")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one: when to use it, how exact it is, its code")
    parser.add_argument("--ladder", metavar="JSON", help="a ladder.json, whose measurements are shown too")
    parser.add_argument(
        "--markdown", action="store_true", help="write Markdown: the page docs/techniques.md, or one card"
    )
    parser.set_defaults(run=_techniques)


def _techniques(options: argparse.Namespace) -> int:
    from lightning_fasttrain.bench.ladder.results import Climbed
    from lightning_fasttrain.cli.technique_table import card, markdown_card, markdown_page, markdown_table
    from lightning_fasttrain.core.checks import one_of
    from lightning_fasttrain.planner.catalogue import known_techniques
    from lightning_fasttrain.technique.facts import facts_of_machine

    known = {technique.__name__: technique for technique in known_techniques()}
    try:
        if options.name is not None:
            one_of("technique", options.name, tuple(known))
    except ValueError as error:
        return refuse("techniques", error)
    try:
        measured = Climbed.read(options.ladder) if options.ladder else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not what `fasttrain ladder` writes"
        return refuse("techniques", f"{options.ladder}: {reason}")
    if options.markdown:
        print(markdown_card(known[options.name], measured) if options.name else markdown_page(measured).rstrip("\n"))
    elif options.name is None:
        print(markdown_table(measured))
    else:
        print(card(known[options.name], measured, facts_of_machine()))
    return 0
