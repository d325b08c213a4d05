"""The command ``fasttrain tune``: measure a user's script, choose techniques for it, and show what to change."""

import argparse
import ast
import json
from dataclasses import asdict
from pathlib import Path

from lightning_fasttrain.cli.command import CommandError, note, refusing
from lightning_fasttrain.cli.rehearsal.rehearse import ask_script
from lightning_fasttrain.cli.tuning.advice import Advice, describe
from lightning_fasttrain.cli.tuning.apply_advice import apply_to_source

TUNE = "FASTTRAIN_TUNE"  # in the environment of the script: what is asked for, as JSON
KEEPS = ("exact", "tolerance", "anything")
# What a new process runs, with the script and its arguments after it.
RUNNER = "from lightning_fasttrain.cli.tuning.tuned_script import run_tuned; run_tuned()"
_POINT = "lightning_fasttrain.cli.tuning.tuned_script:make_callbacks"


def tune_script(options: argparse.Namespace) -> int:
    """Run ``fasttrain tune``: print what to add to a script, and what it gains there."""
    script = Path(options.script)
    _refuse_bad_input(options, script)
    orders = {"memory": options.memory, "keep": options.keep, "seconds": 60 * options.minutes}
    told = {TUNE: json.dumps(orders)}
    note(f"Running {script} up to its first steps; then its model is measured on copies, and the script ends.")
    result, code = ask_script(options.script, options.arguments, told, quiet=options.json, point=_POINT, runner=RUNNER)
    if result is None and code == 0:
        raise CommandError("the script ended without a Trainer.fit, or a loop with six steps, so nothing was measured.")
    if result is None:
        raise CommandError(f"the script ended with {code} before its first step, see above.", 1)
    if not result["ok"]:
        raise CommandError(result["error"], 1)
    advice = Advice(**result["advice"])
    if options.json:
        print(json.dumps({"is_worth_it": advice.is_worth_it, **asdict(advice)}, indent=2))
    else:
        print(describe(advice, script))
    if options.out:
        from lightning_fasttrain.cli.tuning.tune_page import save_page

        with refusing(OSError):
            note(f"Written: {save_page(advice, script, options.out)}")
    if options.apply and advice.is_worth_it:
        with refusing(OSError):
            note(f"Written: {write_copy(script, advice)}")
    elif options.apply:
        note("Nothing was written, since nothing is advised.")
    return 0


def _refuse_bad_input(options: argparse.Namespace, script: Path) -> None:
    if options.minutes <= 0:
        raise CommandError(f"--minutes {options.minutes:g}: no time to measure anything. Use --minutes 5.")
    if options.memory != "fit" and not _is_positive(options.memory):
        raise CommandError(f"--memory {options.memory}: expected GiB, as in --memory 20, or fit.")
    with refusing(SyntaxError, OSError):
        imported = _list_imports(script.read_text())
    if "pytorch_lightning" in imported:
        raise CommandError(
            f"{script} imports pytorch_lightning, whose Trainer takes no callbacks of the package lightning. "
            "Write import lightning.pytorch as pl instead; the rest of the script stays as it is."
        )


def _list_imports(source: str) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def write_copy(script: Path, advice: Advice) -> Path:
    """Write the script with the advice applied to ``SCRIPT_tuned.py`` beside it.

    Raises:
        CommandError: the Trainer's arguments cannot be changed by a program.
    """
    from lightning_fasttrain.core.atomic_write import write_atomic

    if advice.replaced:
        names = ", ".join(advice.replaced)
        raise CommandError(
            f"{script} has {names}, which the advice replaces, so nothing was written. Change it by hand."
        )
    changed = apply_to_source(script.read_text(), advice.techniques, advice.precision)
    if changed is None:
        raise CommandError(
            f"{script} makes several Trainers, or gives its callbacks as something other than a list, so nothing was "
            "written. Change the line above by hand."
        )
    return write_atomic(script.with_name(f"{script.stem}_tuned.py"), changed)
