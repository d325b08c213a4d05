"""``fasttrain verify``: is it the same training, on this model?"""

import argparse
import json
import shlex
from pathlib import Path

from lightning_fasttrain.cli.target import (
    BAD_INPUT,
    Commands,
    add_target,
    find_report,
    load_target,
    refuse,
    show_report,
)


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="run a step without and with techniques: is it the same training, on this model?",
        description="Run the same steps without and with techniques on copies of a model, and compare loss, gradients, "
        "updates and evaluation with what rounding alone does. The exit code is 0 if every technique keeps what it "
        "promises, 1 if not. TARGET is imported and called, which runs its code. A script is run, unchanged, up to the "
        "first step of its first fit, whose techniques, batches and precision are verified.",
    )
    add_target(parser, "sequences of that GPT's batch; default: 4")
    parser.add_argument(
        "--script", metavar="FILE", help="a Python script that trains with Lightning, instead of TARGET"
    )
    parser.add_argument("--script-args", default="", metavar="ARGS", help="of the script, in one quoted word")
    parser.add_argument(
        "--techniques", default="", metavar="A,B=8", help="after = the first argument; default: those of the model"
    )
    parser.add_argument("--precision", default="32-true", help="as for the Trainer; default: 32-true")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps; default: 2")
    parser.add_argument("--operators", action="store_true", help="if it is another training, name the first operator")
    parser.add_argument("--accelerator", default="auto", help="as for the Trainer: auto (default), cpu or gpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.script is not None:
        return _verify_script(options)
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.dry_run import Verification, verify

    def find(_: object) -> Verification:
        module, batch = load_target(options)
        return verify(
            module,
            batch,
            techniques_named(options.techniques) or None,
            precision=options.precision,
            steps=options.steps,
            operators=options.operators,
            accelerator=options.accelerator,
        )

    verified = find_report("verify", "Running the same steps without and with techniques…", find)
    if verified is None:
        return BAD_INPUT
    show_report(verified, options.json)
    return 0 if verified.ok else 1


def _verify_script(options: argparse.Namespace) -> int:
    from lightning_fasttrain.cli.rehearsal.rehearse import ask_script

    if options.target is not None or options.size is not None:
        return refuse("verify", "give either TARGET, --size or --script, see --help.")
    if not Path(options.script).is_file():
        return refuse("verify", f"there is no script {options.script}. Give a Python file.")
    orders = {"FASTTRAIN_VERIFY": json.dumps({"techniques": options.techniques, "steps": options.steps})}
    result, code = ask_script(options.script, shlex.split(options.script_args), orders, quiet=options.json)
    if result is None:
        return refuse("verify", f"the script ended with {code} before a first step. Nothing was verified.")
    if "error" in result:
        return refuse("verify", result["error"])
    print(json.dumps(result["report"], indent=2) if options.json else result["table"])
    return 0 if result["ok"] else 1
