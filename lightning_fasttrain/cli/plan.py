"""``fasttrain plan``: the fastest way to train a model within a limit of memory."""

import argparse
from typing import Any

from lightning_fasttrain.cli.target import (
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
        "plan",
        help="measure a model, and choose the fastest mix of techniques that fits a limit of memory",
        description="Measure a model, predict what each mix of techniques takes, and choose the fastest that fits, for "
        "the same global batch. Prints a table, reasons and code. TARGET is imported and called, which runs its code.",
    )
    add_target(parser, "sequences of that GPT's batch; default: 4")
    parser.add_argument("--memory", metavar="GIB", default="fit", help="limit in GiB; default: what is free here")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="that train together; default: 1")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="machines they are in; default: 1")
    parser.add_argument("--keep", default="tolerance", help="exact, tolerance (default) or changes_training")
    parser.add_argument("--precision", help="of your training, which then stays; default: it may be chosen")
    parser.add_argument("--device", help="cuda or cpu; one that is not here is planned for by prediction alone")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="of the coming run; default: 1000")
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="for measuring, about; default: 120")
    parser.add_argument("--out", metavar="DIR", help="folder for plan.json, plan.yaml and plan.png")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from lightning_fasttrain.planner import Plan, make_plan

    def find(status: Any) -> Plan:
        module, batch = load_target(options)
        return make_plan(
            module,
            batch,
            _number_or_word(options.memory),
            options.devices,
            nodes=options.nodes,
            keep=options.keep,
            precision=options.precision,
            device=options.device,
            steps=options.steps,
            seconds=options.seconds,
            tell=status.update,
        )

    plan = find_report("plan", "looking at the model", find)
    if plan is None:
        return BAD_INPUT
    console = show_report(plan, options.json)
    if not options.json:
        console.print(plan.code(), markup=False, highlight=False, soft_wrap=True)
    if options.out:
        _write(plan, options.out)
    return 0


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # "fit", or what make_plan will refuse


def _write(plan: Any, folder: str) -> None:
    import sys
    from pathlib import Path

    from lightning_fasttrain.core.files.atomic_write import write_atomic

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    written = [plan.save(place / "plan.json"), write_atomic(place / "plan.yaml", plan.yaml())]
    try:
        written.append(plan.save_picture(place / "plan.png"))
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
    print("Written:", ", ".join(map(str, written)), file=sys.stderr)
