"""``fasttrain verify``: is it the same training, on this model?"""

import argparse

from lightning_fasttrain.commands.target import (
    BAD_INPUT,
    Commands,
    add_target,
    find_report,
    load_target,
    show_report,
)


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="run a step without and with techniques: is it the same training, on this model?",
        description="Run the same steps without and with techniques on copies of a model, and compare loss, gradients, "
        "updates and evaluation with what rounding alone does. The exit code is 0 if every technique keeps what it "
        "promises, 1 if not. TARGET is imported and called, which runs its code.",
    )
    add_target(parser, "sequences of that GPT's batch; default: 4")
    parser.add_argument("--techniques", default="", metavar="A,B=8", help="after = the first argument")
    parser.add_argument("--precision", default="32-true", help="as for the Trainer; default: 32-true")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="optimizer steps; default: 1")
    parser.add_argument("--accelerator", default="auto", help="as for the Trainer: auto (default), cpu or gpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from lightning_fasttrain.plan import Verification, verify
    from lightning_fasttrain.plan.subject import techniques_named

    def find(_: object) -> Verification:
        module, batch = load_target(options)
        return verify(
            module,
            batch,
            techniques_named(options.techniques) or None,
            precision=options.precision,
            steps=options.steps,
            accelerator=options.accelerator,
        )

    verified = find_report("verify", "Running the same steps without and with techniques…", find)
    if verified is None:
        return BAD_INPUT
    show_report(verified, options.json)
    return 0 if verified.ok else 1
