"""``fasttrain why-not``: every technique that is not in use, and why."""

import argparse

from lightning_fasttrain.cli.target import (
    BAD_INPUT,
    Commands,
    add_target,
    find_report,
    load_target_without_memory,
    show_report,
)


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "why-not",
        help="every technique that is not in use: why not, and what it would bring",
        description="Say of every technique that is not in use why it cannot, or need not, act on a model on this "
        "machine, and predict what it would bring in memory. TARGET is imported and called, which runs its code.",
    )
    add_target(parser, "sequences of that GPT's batch; default: the size's own")
    parser.add_argument("--techniques", default="", metavar="A,B=8", help="in use; after = the first argument")
    parser.add_argument("--precision", default="32-true", help="32-true (default), bf16-mixed or bf16-true")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.planner import UnusedReport, why_not

    def find(_: object) -> UnusedReport:
        module, batch = load_target_without_memory(options)
        techniques = techniques_named(options.techniques) or None
        return why_not(module, batch, techniques, precision=options.precision)

    report = find_report("why-not", "Asking each technique…", find)
    if report is None:
        return BAD_INPUT
    show_report(report, options.json)
    return 0
