"""``fasttrain why-not``: every technique that is not in use, and why."""

import argparse
from typing import Any

from lightning_fasttrain.commands.target import Commands, add_target, refuse


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "why-not",
        help="every technique that is not in use: why not, and what it would bring",
        description="Say of every technique that is not in use why it cannot, or need not, act on a model on this "
        "machine, and predict what it would bring in memory. TARGET is imported and called, which runs its code.",
    )
    add_target(parser)
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of that GPT's batch; default: the size's own")
    parser.add_argument("--techniques", default="", metavar="A,B=8", help="in use; after = the first argument")
    parser.add_argument("--precision", default="32-true", help="32-true (default), bf16-mixed or bf16-true")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from lightning_fasttrain._checks import positive_int
    from lightning_fasttrain._messages import wide_enough
    from lightning_fasttrain.bench import zoo
    from lightning_fasttrain.bench.sizes import size_named
    from lightning_fasttrain.plan import why_not
    from lightning_fasttrain.plan.subject import load_subject, techniques_named

    if (options.target is None) == (options.size is None):
        return refuse("why-not", "give either TARGET or --size. See fasttrain why-not --help.")
    console = wide_enough(Console())
    try:
        with Console(stderr=True).status("Asking each technique…"):  # stdout has the report alone
            if options.size is not None:
                batch = size_named(options.size).batch if options.batch is None else options.batch
                specimen = zoo.gpt(options.size, positive_int("batch", batch))
                subject: Any = (specimen.module, specimen.batch())
            else:
                subject = load_subject(options.target, options.arg)
            techniques = techniques_named(options.techniques) or None
            report = why_not(subject[0], subject[1], techniques, precision=options.precision)
    except (ValueError, TypeError) as error:
        return refuse("why-not", error)
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        console.print(report.as_table())
    return 0
