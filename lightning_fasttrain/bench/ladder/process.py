"""Train each state in a process of its own, which pauses between turns, so that several are measured in turn."""

import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_fasttrain.bench.ladder import worker

_TO_END_S = 10.0

Progress = Callable[[dict[str, Any]], None]


class WorkerError(Exception):
    """A worker failed, died or took too long."""


class Worker:
    """Trains one state in a new process, which inherits no compiled code, allocator state or global settings.

    The process warms up, measures its memory, and then pauses before each turn of timed steps, so that several
    workers can be measured in turn.

    Args:
        spec: what :func:`.worker.run_rung` takes.
        on_progress: called with each message of the worker.
        limit_s: the process is stopped if it sends nothing new to measure for this many seconds.
        work: what the process does, a function that can be imported.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        on_progress: Progress,
        limit_s: float = 3600.0,
        work: Callable[..., None] = worker.work,
    ) -> None:
        context = _way_to_start()
        self.on_progress, self.limit_s = on_progress, limit_s
        self._paused = False
        self._folder = tempfile.TemporaryDirectory(prefix="fasttrain-")
        folder = self._folder.name
        self._result_file, self._stderr_file = Path(folder, "result.json"), Path(folder, "stderr")
        self._messages, theirs = context.Pipe()
        arguments = {**spec, "folder": folder}, self._result_file, self._stderr_file, theirs
        self._process = context.Process(target=work, args=arguments)
        with _threads_that_sleep():
            self._process.start()
        # Only the worker may hold this end, or there is no EOF when it ends.
        theirs.close()

    def pause(self) -> dict[str, Any]:
        """Wait until the worker pauses, and return what it has measured so far.

        Raises:
            WorkerError: it ended instead.
        """
        end = time.monotonic() + self.limit_s
        try:
            while self._messages.poll(max(0.0, end - time.monotonic())):
                message = self._messages.recv()
                if message.get("phase") == "turn":
                    self._paused = True
                    return message
                self.on_progress(message)
        except (EOFError, OSError):
            raise WorkerError(without_paths(self._cause_of_end())) from None
        raise WorkerError(f"stopped after {self.limit_s:g} s")

    def turn(self) -> dict[str, Any]:
        """Run one turn, and return what the worker has measured so far.

        Raises:
            WorkerError: it ended instead.
        """
        self._paused = False
        try:
            self._messages.send(True)
        except OSError:
            raise WorkerError(without_paths(self._cause_of_end())) from None
        return self.pause()

    def close(self) -> None:
        """End the process. No result of it is lost, since each turn has returned them."""
        if self._paused:
            # So that it ends what it has started itself, such as processes that compile.
            with suppress(OSError):
                self._messages.send(False)
            self._process.join(_TO_END_S)
        self._process.kill()
        self._process.join()
        self._messages.close()
        self._folder.cleanup()

    def _cause_of_end(self) -> str:
        self._process.join(self.limit_s)
        if self._result_file.exists():
            found: dict[str, Any] = json.loads(self._result_file.read_text())
            return found.get("error", "the process ended before its time")
        return _cause_of_death(self._process.exitcode, self._stderr_file)


def _way_to_start() -> Any:
    """Return the multiprocessing context: a fork server where there is one, otherwise new processes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Importing torch and Lightning takes longer than many a run, so one process does it, and the workers are its forks.
    # That process never touches CUDA, which would not survive a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context


@contextmanager
def _threads_that_sleep() -> Iterator[None]:
    """Let threads of processes started here sleep while they wait for each other; by default OpenMP's spin.

    Spinning counts as processor time, so that a neighbour which delays one thread makes the others' time grow: a step
    of 16 micro-batches beside three busy processes took 9 to 16 processor-seconds with it and 3 without, of 3 on one
    thread.
    """
    key, asked_for = "OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY")
    os.environ[key] = asked_for or "passive"
    try:
        yield
    finally:
        if asked_for is None:
            del os.environ[key]


def _cause_of_death(exitcode: int | None, stderr_file: Path) -> str:
    if exitcode == -9:  # what Linux does when memory runs out
        return "the process was killed (signal 9): most likely out of memory"
    if exitcode is not None and exitcode < 0:
        return f"the process died of signal {-exitcode}"
    lines = [f"the process ended with exit code {exitcode} and no result"]
    if stderr_file.exists():
        lines += stderr_file.read_text(errors="replace").strip().splitlines()
    return lines[-1]


def without_paths(text: str) -> str:
    """Shorten absolute paths in ``text`` to their last part, so that results do not name the machine's folders.

    Example:
        >>> without_paths("no module in /home/someone/project/net.py")
        'no module in …/net.py'
    """
    return re.sub(r"(?<![\w.…])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"]+){2,}", lambda m: f"…/{_last_part(m.group())}", text)


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]
