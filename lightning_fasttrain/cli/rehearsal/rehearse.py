"""The command ``fasttrain rehearse``: run a user's script, unchanged, up to its first step; or kill it repeatedly."""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fasttrain.cli.command import CommandError
from lightning_fasttrain.cli.rehearsal.rehearse_kills import FOLDER, rehearse_kills
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, SECONDS, run_script

_POINT = "lightning_fasttrain.cli.rehearsal.rehearsed_script:make_callbacks"


def rehearse(options: argparse.Namespace) -> int:
    """Run ``fasttrain rehearse``: a script up to its first step, or killed and started again."""
    _refuse_bad_kills(options)
    if options.kill:
        return _rehearse_kills(options)
    return _rehearse(options)


def _refuse_bad_kills(options: argparse.Namespace) -> None:
    _refuse_missing(options.script)
    if options.kill < 0:
        raise CommandError(f"--kill {options.kill}: it is a number of kills. Use --kill 5.")
    if options.kill and not any(FOLDER in argument for argument in options.arguments):
        raise CommandError(
            f"--kill needs {FOLDER} among the script's arguments: the script writes real checkpoints, and every run "
            f"needs a folder of its own. Give it where the script takes its folder: {options.script} --out {FOLDER}"
        )
    if options.kill and options.kill >= options.steps:
        why = "there is a kill a step at most. Use more steps."
        raise CommandError(f"--kill {options.kill} with --steps {options.steps}: {why}")


def _refuse_missing(script: str) -> None:
    if not Path(script).is_file():
        raise CommandError(f"there is no script {script}. Give a Python file.")


def _rehearse(options: argparse.Namespace) -> int:
    result, code = rehearse_script(options.script, options.arguments, options.seconds, quiet=options.json)
    if result is None and code == 0:
        raise CommandError("the script ended without a Trainer.fit. Nothing was rehearsed.")
    if result is None:
        raise CommandError(f"the script ended with {code} before its first step, see above.", 1)
    if options.json:
        print(json.dumps(result, indent=2))
    elif not result["ok"]:
        raise CommandError(result["error"], 1)
    else:
        for line in _describe(result["report"]):
            print(line)
    return int(not result["ok"])


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
    return ask_script(script, arguments, {SECONDS: str(seconds)}, quiet=quiet)


def ask_script(
    script: str, arguments: Sequence[str], orders: Mapping[str, str], *, quiet: bool
) -> tuple[dict[str, Any] | None, int]:
    """Run a script up to its first step; returns what the callback found, None if no fit began, and the exit code."""
    _refuse_missing(script)
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        code = run_script(script, arguments, _POINT, {RESULT: str(result), **orders}, quiet=quiet)
        if not result.exists():
            return None, code
        return json.loads(result.read_text()), code


def _describe(report: dict[str, Any]) -> list[str]:
    lines = [f"{stage}: {sentence}" for stage, sentence in report["lines"].items()]
    return [*lines, *report["notes"], f"Rehearsed in {report['seconds']:.1f} s."]


def _rehearse_kills(options: argparse.Namespace) -> int:
    found = rehearse_kills(
        options.script, options.arguments, options.kill, options.steps, options.seed, quiet=options.json
    )
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
        return int(not found.ok)
    for number, moment in enumerate(found.moments, 1):
        print(f"kill {number}: {moment}")
    if found.ok:
        what = f"weights, buffers, optimizers and schedules after step {found.steps}"
        print(f"the end: {what} are the uninterrupted run's, bit for bit")
    print(f"Rehearsed in {found.seconds:.1f} s.")
    if not found.ok:
        raise CommandError(found.problem, 1)
    return 0
