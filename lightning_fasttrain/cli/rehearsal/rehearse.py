"""The command ``fasttrain rehearse``: a user's own script, unchanged, up to its first step; or killed on trial."""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fasttrain.cli.rehearsal.rehearse_kills import FOLDER, Kills, rehearse_kills
from lightning_fasttrain.cli.rehearsal.run_script import run_script
from lightning_fasttrain.cli.target import Commands

_BAD_INPUT = 2
_POINT = "lightning_fasttrain.cli.rehearsal.rehearsed_script:make_callbacks"


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "rehearse",
        help="run a script up to its first step, and try out what its later hours will do",
        description="Run a Python script, unchanged, with ft.dry_run.Rehearsal() in each of its Trainers. The script "
        "ends before the first step of its first fit. With --kill it trains instead, once whole and once killed and "
        "started again, and both must end identically, bit for bit. The exit code is 0 if all went well, 1 if the run "
        "would fail, 2 if there is nothing to rehearse.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="about how long; default: 60")
    parser.add_argument(
        "--kill", type=int, default=0, metavar="N", help="kill it N times; write {folder} where it takes its folder"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="with --kill: of a run; default: 20")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="with --kill: for its moments; default: 0")
    parser.add_argument("--json", action="store_true", help="print JSON; what the script prints goes to stderr")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains with Lightning")
    # All that comes after the script is its own, even if it looks like an option of ours.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    problem = _find_bad_input(options)
    if problem:
        print(f"fasttrain rehearse: {problem}", file=sys.stderr)
        return _BAD_INPUT
    return _rehearse_kills(options) if options.kill else _rehearse(options)


def _find_bad_input(options: argparse.Namespace) -> str:
    if not Path(options.script).is_file():
        return f"there is no script {options.script}. Give a Python file."
    if options.kill < 0:
        return f"--kill {options.kill}: it is a number of kills. Use --kill 5."
    if options.kill and not any(FOLDER in argument for argument in options.arguments):
        return (
            f"--kill needs {FOLDER} among the script's arguments: the script writes real checkpoints, and every run "
            f"needs a folder of its own. Give it where the script takes its folder: {options.script} --out {FOLDER}"
        )
    if options.kill and options.kill >= options.steps:
        return f"--kill {options.kill} with --steps {options.steps}: there is a kill a step at most. Use more steps."
    return ""


def _rehearse(options: argparse.Namespace) -> int:
    result, code = rehearse_script(options.script, options.arguments, options.seconds, quiet=options.json)
    if result is None and code == 0:
        print("fasttrain rehearse: the script ended without a Trainer.fit. Nothing was rehearsed.", file=sys.stderr)
        return _BAD_INPUT
    if result is None:
        print(f"fasttrain rehearse: the script ended with {code} before its first step, see above.", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result, indent=2))
    elif not result["ok"]:
        print(f"fasttrain rehearse: {result['error']}", file=sys.stderr)
    else:
        for line in _describe(result["report"]):
            print(line)
    return 0 if result["ok"] else 1


def rehearse_script(
    script: str, arguments: Sequence[str], seconds: float, *, quiet: bool = False
) -> tuple[dict[str, Any] | None, int]:
    """Run a script with a rehearsal in each Trainer, in a process of its own.

    Args:
        script: a file.
        arguments: of it.
        seconds: see ``Rehearsal``.
        quiet: what the script prints goes to stderr.

    Returns:
        What was found, None if no fit began; and the exit code of the script.
    """
    return ask_script(script, arguments, {"FASTTRAIN_REHEARSAL_SECONDS": str(seconds)}, quiet=quiet)


def ask_script(
    script: str, arguments: Sequence[str], orders: Mapping[str, str], *, quiet: bool
) -> tuple[dict[str, Any] | None, int]:
    """Run a script up to its first step; returns what the callback found, None if no fit began, and the exit code."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        code = run_script(script, arguments, _POINT, {"FASTTRAIN_REHEARSAL_RESULT": str(result), **orders}, quiet=quiet)
        return json.loads(result.read_text()) if result.exists() else None, code


def _describe(report: dict[str, Any]) -> list[str]:
    lines = [f"{stage}: {sentence}" for stage, sentence in report["lines"].items()]
    return [*lines, *report["notes"], f"Rehearsed in {report['seconds']:.1f} s."]


def _rehearse_kills(options: argparse.Namespace) -> int:
    found = rehearse_kills(
        options.script, options.arguments, options.kill, options.steps, options.seed, quiet=options.json
    )
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print_kills(found)
    return 0 if found.ok else 1


def _print_kills(found: Kills) -> None:
    for number, moment in enumerate(found.moments, 1):
        print(f"kill {number}: {moment}")
    if found.problem:
        print(f"fasttrain rehearse: {found.problem}", file=sys.stderr)
    else:
        print(
            f"the end: weights, buffers, optimizers and schedules after step {found.steps} are the uninterrupted "
            f"run's, bit for bit"
        )
    print(f"Rehearsed in {found.seconds:.1f} s.")
