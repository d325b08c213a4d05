"""Run one spec in a fresh Python process, hear of its progress, and get its result or the reason there is none."""

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_fasttrain.bench.machine import Neighbours

_WORKER = ["-m", "lightning_fasttrain.bench.worker"]
_QUIET_CORES = 0.3
Progress = Callable[[dict[str, Any]], None]


def run_in_fresh_process(spec: dict[str, Any], on_progress: Progress, limit_s: float = 3600.0) -> dict[str, Any]:
    """Run ``lightning_fasttrain.bench.worker`` on ``spec``.

    A process of its own, so that no rung inherits another's compiled code, allocator state or global switches, and
    so that a crash takes down nothing else.

    Args:
        spec: what :func:`.worker.run_rung` takes.
        on_progress: called with each line of progress.
        limit_s: the process is stopped after this many seconds.

    Returns:
        The worker's result; ``{"error": reason}`` if it failed, died or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="fasttrain-") as folder:
        spec_file, result_file, stderr_file = (Path(folder) / name for name in ("spec.json", "result.json", "stderr"))
        spec_file.write_text(json.dumps({**spec, "folder": folder}))
        command = [sys.executable, *_WORKER, str(spec_file), str(result_file)]
        with stderr_file.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        too_long, neighbours = threading.Event(), Neighbours()

        def stop() -> None:
            too_long.set()
            process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _pass_on(line, on_progress)
            process.wait()
        finally:  # also on Ctrl-C: no worker may be left behind
            timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
        others = neighbours.cores()
        if result_file.exists():
            result: dict[str, Any] = json.loads(result_file.read_text())
        elif too_long.is_set():
            result = {"error": f"stopped after {limit_s:g} s"}
        else:
            result = {"error": _cause_of_death(process.returncode, stderr_file)}
    if "error" in result:
        result["error"] = without_paths(result["error"])
    elif others is not None and others > _QUIET_CORES:
        result["disturbed_cores"] = round(others, 2)
    return result


def _pass_on(line: str, on_progress: Progress) -> None:
    try:
        progress = json.loads(line)
    except json.JSONDecodeError:
        return  # something that a library printed
    if isinstance(progress, dict):
        on_progress(progress)


def _cause_of_death(returncode: int, stderr_file: Path) -> str:
    if returncode == -9:
        return "the process was killed (signal 9): most likely out of memory"
    if returncode < 0:
        return f"the process died of signal {-returncode}"
    lines = stderr_file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the process ended with exit code {returncode} and no result"


def without_paths(text: str) -> str:
    """``text`` with absolute paths cut to their last part: a result file says nothing about the machine's folders.

    Example:
        >>> without_paths("no module in /home/someone/project/net.py")
        'no module in …/net.py'
    """
    return re.sub(r"(?<![\w.…])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"]+){2,}", lambda m: f"…/{_last_part(m.group())}", text)


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]
