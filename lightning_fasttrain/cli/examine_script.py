"""The command ``fasttrain doctor``: what this machine lacks, and what a user's script wastes."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from lightning_fasttrain.cli.command import CommandError, refusing
from lightning_fasttrain.cli.rehearsal.run_script import RESULT, run_script

_MODULE = "lightning_fasttrain.cli.examined_script"
_LEAST_STEPS = 6


def run_doctor(options: argparse.Namespace) -> None:
    """Run ``fasttrain doctor``: examine the machine, and a script if one is given."""
    _refuse_bad_input(options)
    found = None if options.script is None else _examine_script(options)
    machine = _examine_machine(in_json=options.json)
    if options.json:
        report = {} if found is None else found["report"]
        print(json.dumps({"machine": machine, **report}, indent=2))
    elif found is not None:
        print(found["table"])
        print(f"Written: {', '.join(found['written'])}")


def _refuse_bad_input(options: argparse.Namespace) -> None:
    if options.steps < _LEAST_STEPS:
        raise CommandError(f"--steps {options.steps}: at least {_LEAST_STEPS} steps are needed. Use --steps 20.")
    if options.warmup < 1:
        raise CommandError(f"--warmup {options.warmup}: the first step is never typical. Use --warmup 3.")
    if options.script is not None and not Path(options.script).is_file():
        raise CommandError(f"there is no script {options.script}. Give a Python file.")
    if options.script is None and options.machine is not None:
        raise CommandError("--machine is what the step of a script is compared with. Give a script, too.")


def _find_machine(given: str) -> str:
    """Return the name or the absolute path of a machine, which is read once for its errors."""
    from lightning_fasttrain.step_time.machine import read_machine

    with refusing(ValueError, OSError):
        read_machine(given)
    return str(Path(given).resolve()) if given.lower().endswith(".json") else given


def _examine_machine(in_json: bool) -> list[dict[str, str]]:
    from lightning_fasttrain.cli import doctor

    findings = doctor.examine()
    if not in_json:
        doctor.as_table(findings).print()
    return [vars(finding) for finding in findings]


def _examine_script(options: argparse.Namespace) -> dict[str, Any]:
    """Run the script in a process of its own; return what the doctor found."""
    from lightning_fasttrain.cli.examined_script import DOCTOR, START

    orders = {"steps": options.steps, "warmup": options.warmup, "out": str(Path(options.out).resolve())}
    if options.machine is not None:
        orders["machine"] = _find_machine(options.machine)
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        environment = {RESULT: str(result), DOCTOR: json.dumps(orders)}
        command = [START, options.script, *options.arguments]
        code = run_script("-c", command, f"{_MODULE}:make_callbacks", environment, quiet=options.json)
        if not result.exists():
            why = f"the script ended with {code} before it had trained a step" if code else "the script trained nothing"
            raise CommandError(f"{why}. Nothing was examined.", 1 if code else 2)
        return json.loads(result.read_text())
