"""``fasttrain memory``: the peak memory of a training step, without the memory."""

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
        "memory",
        help="predict the peak memory of a training step, without the memory",
        description="Predict the peak memory of one training step, by category, on a machine that need not fit it. "
        "TARGET is imported and called, which runs its code.",
    )
    add_target(parser, "sequences of that GPT's batch; default: the size's own")
    parser.add_argument("--techniques", default="", metavar="A,B=8", help="after = the first argument; default: none")
    parser.add_argument("--precision", default="32-true", help="32-true (default), bf16-mixed or bf16-true")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu; none is touched")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.predict import MemoryReport, predict_memory

    def find(_: object) -> MemoryReport:
        return predict_memory(
            *load_target_without_memory(options),
            techniques=techniques_named(options.techniques),
            precision=options.precision,
            device=options.device,
        )

    report = find_report("memory", "Predicting…", find)
    if report is None:
        return BAD_INPUT
    show_report(report, options.json)
    return 0
