"""Run one rung in a process of its own, pass on its progress, and return its result or its error."""

import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_fasttrain.bench.ladder import worker

Progress = Callable[[dict[str, Any]], None]


def run_in_own_process(
    spec: dict[str, Any], on_progress: Progress, limit_s: float = 3600.0, work: Callable[..., None] = worker.work
) -> dict[str, Any]:
    """Run one rung in a new process, so that it inherits no compiled code, allocator state or global settings.

    Args:
        spec: what :func:`.worker.run_rung` takes.
        on_progress: called with each message of the worker.
        limit_s: the process is stopped after this many seconds.
        work: what the process does, a function that can be imported.

    Returns:
        The worker's result; ``{"error": reason}`` if it failed, died or took too long.
    """
    context = _way_to_start(spec["device"])
    with tempfile.TemporaryDirectory(prefix="fasttrain-") as folder:
        result_file, stderr_file = (Path(folder) / name for name in ("result.json", "stderr"))
        messages, teller = context.Pipe(duplex=False)
        process = context.Process(target=work, args=({**spec, "folder": folder}, result_file, stderr_file, teller))
        process.start()
        # Only the worker may hold this end, or there is no EOF when it ends.
        teller.close()
        try:
            in_time = _listen(messages, on_progress, limit_s)
            if in_time:
                process.join()
        finally:  # also on Ctrl-C: no worker may be left behind
            process.kill()
            process.join()
            messages.close()
        if not in_time:
            return {"error": f"stopped after {limit_s:g} s"}
        if not result_file.exists():
            return {"error": without_paths(_cause_of_death(process.exitcode, stderr_file))}
        result: dict[str, Any] = json.loads(result_file.read_text())
    return {"error": without_paths(result["error"])} if "error" in result else result


def _way_to_start(device: str) -> Any:
    """Return the multiprocessing context: a fork server on a CPU, otherwise new processes."""
    # CUDA does not survive a fork, and Windows has none.
    if device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Importing torch and Lightning takes longer than many a run, so one process does it, and the workers are its forks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context


def _listen(messages: "Connection[Any, Any]", on_progress: Progress, limit_s: float) -> bool:
    """Pass on the worker's messages until it ends; return False if it still runs after ``limit_s``."""
    end = time.monotonic() + limit_s
    while messages.poll(max(0.0, end - time.monotonic())):
        try:
            on_progress(messages.recv())
        except EOFError:
            return True
    return False


def _cause_of_death(exitcode: int, stderr_file: Path) -> str:
    if exitcode == -9:  # what Linux does when memory runs out
        return "the process was killed (signal 9): most likely out of memory"
    if exitcode < 0:
        return f"the process died of signal {-exitcode}"
    lines = stderr_file.read_text(errors="replace").strip().splitlines() if stderr_file.exists() else []
    return lines[-1] if lines else f"the process ended with exit code {exitcode} and no result"


def without_paths(text: str) -> str:
    """Shorten absolute paths in ``text`` to their last part, so that results do not name the machine's folders.

    Example:
        >>> without_paths("no module in /home/someone/project/net.py")
        'no module in …/net.py'
    """
    return re.sub(r"(?<![\w.…])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"]+){2,}", lambda m: f"…/{_last_part(m.group())}", text)


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]
