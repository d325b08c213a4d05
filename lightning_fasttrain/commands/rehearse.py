"""The command ``fasttrain rehearse``: a user's own script, unchanged, up to its first step."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_BAD_INPUT = 2
_POINT = "lightning_fasttrain.commands.rehearsed_script:make_callbacks"


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "rehearse",
        help="run a script up to its first step, and try out what its later hours will do",
        description="Run a Python script, unchanged, with ft.Rehearsal() in each of its Trainers. The script ends "
        "before the first step of its first fit. The exit code is 0 if all went well, 1 if the run would fail, "
        "2 if there is nothing to rehearse.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="about how long; default: 60")
    parser.add_argument("--json", action="store_true", help="print JSON; what the script prints goes to stderr")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains with Lightning")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    parser.set_defaults(run=_rehearse)


def _rehearse(options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        print(f"fasttrain rehearse: there is no script {options.script}. Give a Python file.", file=sys.stderr)
        return _BAD_INPUT
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

    The callback comes by Lightning's own entry points for callbacks, from a folder on the Python path that lasts as
    long as the script: ranks that a launcher starts get it too, and no code of the script or of Lightning is changed.

    Args:
        script: a file.
        arguments: of it.
        seconds: see ``Rehearsal``.
        quiet: what the script prints goes to stderr.

    Returns:
        What was found, None if no fit began; and the exit code of the script.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_entry_point(folder)
        path = [name, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "FASTTRAIN_REHEARSAL_RESULT": str(folder / "result.json"),
            "FASTTRAIN_REHEARSAL_SECONDS": str(seconds),
        }
        to = sys.stderr.fileno() if quiet else None
        code = _run([sys.executable, script, *arguments], environment, to)
        result = folder / "result.json"
        return json.loads(result.read_text()) if result.exists() else None, code


def _write_entry_point(folder: Path) -> None:
    about = folder / "fasttrain_rehearsal-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fasttrain-rehearsal\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[lightning.pytorch.callbacks_factory]\nrehearsal = {_POINT}\n")


def _run(command: list[str], environment: dict[str, str], stdout: int | None) -> int:
    """Run it in a process group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True)
    try:
        return process.wait()
    finally:  # other ranks and workers, and all of them after Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _describe(report: dict[str, Any]) -> list[str]:
    lines = [f"{stage}: {sentence}" for stage, sentence in report["lines"].items()]
    return [*lines, *report["notes"], f"Rehearsed in {report['seconds']:.1f} s."]
