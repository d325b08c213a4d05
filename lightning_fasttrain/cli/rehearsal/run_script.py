"""Run a user's script, unchanged, with a callback of ours in each of its Trainers."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# In the environment of the script: a file for the result, and what is asked for.
RESULT, SECONDS, VERIFY = "FASTTRAIN_REHEARSAL_RESULT", "FASTTRAIN_REHEARSAL_SECONDS", "FASTTRAIN_VERIFY"


def run_script(
    script: str, arguments: Sequence[str], point: str, orders: Mapping[str, str], *, quiet: bool = False
) -> int:
    """Run a script in a process of its own.

    The callback comes by Lightning's own entry points for callbacks, from a folder on the Python path that lasts as
    long as the script: ranks that a launcher starts get it too, and no code of the script or of Lightning is changed.

    Args:
        script: a file.
        arguments: of it.
        point: ``module:function`` of the entry point, which returns a list of callbacks.
        orders: what it finds in the environment.
        quiet: what the script prints goes to stderr.

    Returns:
        The exit code; negative, as ``subprocess`` has it, if a signal ended it.
    """
    with tempfile.TemporaryDirectory() as name:
        write_entry_point(Path(name), point)
        # An empty entry of the path would mean the current folder.
        path = [name, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **orders}
        return _run([sys.executable, script, *arguments], environment, sys.stderr.fileno() if quiet else None)


def write_entry_point(folder: Path, point: str) -> None:
    """Write the metadata of a package with an entry point for Lightning's callbacks into ``folder``."""
    about = folder / "fasttrain_rehearsal-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fasttrain-rehearsal\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[lightning.pytorch.callbacks_factory]\nrehearsal = {point}\n")


def _run(command: list[str], environment: dict[str, str], stdout: int | None) -> int:
    """Run a command in a process group of its own, all of whose processes are killed afterwards."""
    process = subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True)
    try:
        return process.wait()
    finally:  # other ranks and workers, and all of them after Ctrl-C
        if sys.platform == "win32":
            process.kill()
        else:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def end_process(code: int, for_all: bool = True) -> NoReturn:
    """End this process at once, without anything that the script does after ``fit`` or at its end.

    Args:
        code: its exit code.
        for_all: whether it ends the script too that has started this process as one of its ranks: Lightning's launcher
            of "ddp_fork" and "ddp_spawn" would wait for what the rank returns.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = multiprocessing.parent_process()
    if for_all and launcher is not None and launcher.pid is not None:
        os.kill(launcher.pid, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    os._exit(code)
