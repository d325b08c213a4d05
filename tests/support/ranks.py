"""Starts scripts, and the ranks of a run, as forks of one process that has imported everything.

Importing takes longer than most of what they do. What a launcher itself must do is tested with real ones, in
``guard_scenarios.py`` and ``test_examples.py``.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from filelock import FileLock

ROOT = Path(__file__).parent.parent.parent
_SEED_OF_A_FRESH_PROCESS = 67280421310721
PRELOADED = ["tests.support.imported"]


class Ranks:
    """Processes that run ``python -m module arguments``, or a script, as torchrun would start them.

    Args:
        module: with a ``__main__`` part; or the path of a script.
        arguments: of its command line.
        log: a file for what they print; what goes to stderr is in ``log.err``.
        count: how many; None for one process that is no rank.
        of_this_process: they are forks of this process itself, and stay in its folder.
    """

    def __init__(
        self, module: str, *arguments: object, log: Path, count: int | None = 2, of_this_process: bool = False
    ) -> None:
        context = multiprocessing.get_context("fork" if of_this_process else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        folder = Path.cwd() if of_this_process else ROOT
        self.files = log, log.with_name(f"{log.name}.err")
        for file in self.files:
            file.touch()
        environments = [{}] if count is None else _ranks_of_a_launch(count)
        argv = [module, *map(str, arguments)]
        preloaded = [] if of_this_process else PRELOADED
        self.processes = []
        for own in environments:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
            process = context.Process(target=_be_a_script, args=(argv, environment, folder, self.files, preloaded))
            process.start()
            self.processes.append(process)

    def wait(self, timeout_s: float = 240) -> str:
        """What they printed, once all have ended well; one that failed, or is too slow, ends them all."""
        codes, said, errors = self.end(timeout_s)
        why = f"exit codes {codes} (None: after {timeout_s} s)\n{said[-3000:]}{errors[-3000:]}"
        assert codes == [0] * len(codes), why
        return said

    def end(self, timeout_s: float = 240) -> tuple[list[int | None], str, str]:
        """The exit codes, once all have ended or one has failed, which ends the others; what went to stdout, stderr."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and not self._over():
            time.sleep(0.05)
        codes = [process.exitcode for process in self.processes]
        self.stop()
        said, errors = (file.read_text() for file in self.files)
        return codes, said, errors

    def _over(self) -> bool:
        codes = [process.exitcode for process in self.processes]
        return None not in codes or any(code not in (None, 0) for code in codes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(module: str, *arguments: object, log: Path, count: int | None = 2, timeout_s: float = 240) -> str:
    """What :class:`Ranks` print."""
    return Ranks(module, *arguments, log=log, count=count).wait(timeout_s)


def run_on_two_gpus(code: str, folder: Path) -> None:
    """Run code under torchrun in two new processes, since a process that was forked has no CUDA."""
    script = folder / "two.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]


def run_code(code: str, *arguments: object, folder: Path, timeout_s: float = 240) -> str:
    """What a program prints that stands in a test, run as a process of its own; ``folder`` gets its script."""
    script = folder / "program.py"
    script.write_text(code)
    return run_ranks(str(script), *arguments, log=folder / "program.log", count=None, timeout_s=timeout_s)


def launch_once(factory: Any, name: str, launch: Callable[[Path], object]) -> Path:
    """A folder that ``launch`` has filled, for several files of tests.

    Of several workers of pytest-xdist the first launches, and the others wait for what it finds.
    """
    several = "PYTEST_XDIST_WORKER" in os.environ
    shared = factory.getbasetemp().parent if several else factory.getbasetemp()
    folder = shared / name
    with FileLock(shared / f"{name}.lock"):
        if not folder.exists():
            folder.mkdir()
            launch(folder)
    return folder


def start_server() -> None:
    """Fork the server of :class:`Ranks` from this process, which has imported almost everything, before its first test.

    A server that starts later, as multiprocessing does, is a fresh interpreter.
    """
    resource_tracker.ensure_running()  # stays a process of its own
    forkserver.set_forkserver_preload(PRELOADED)
    with patch("multiprocessing.util.spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(executable: bytes, arguments: Sequence[str], passed_fds: Sequence[int]) -> int:
    """Run the code of ``python -c code`` in a fork that has only these files open, and what it prints to."""
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()  # pytest's
        kept = sorted({0, 1, 2, *passed_fds})
        for below, above in itertools.pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(below + 1, above)
        warnings.simplefilter("ignore")
        torch.manual_seed(_SEED_OF_A_FRESH_PROCESS)  # what was collected may have drawn
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def end_as_a_script(code: Any, empty_modules: bool = True) -> NoReturn:
    """End a fork as its interpreter would: threads are joined, exit functions called and modules emptied.

    Half a second goes into the modules, so that a few tests are enough for what happens there.
    """
    if empty_modules:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ranks_of_a_launch(count: int) -> list[dict[str, str]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    launch |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [{**launch, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _forget_scenarios() -> None:
    """Have scripts that tests have imported be imported anew, since they read the rank and the number of ranks."""
    for name in [name for name in sys.modules if name.endswith("_scenarios")]:
        package, _, module = sys.modules.pop(name).__name__.rpartition(".")
        vars(sys.modules[package]).pop(module, None)


def _be_a_script(
    argv: list[str], environment: dict[str, str], folder: Path, files: tuple[Path, Path], preloaded: list[str]
) -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a notebook's cell has its own
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name in preloaded:  # if that failed, the server has said nothing, and it fails here again
        importlib.import_module(name)
    gc.freeze()  # what was imported before stays: nobody need look through it
    warnings.simplefilter("ignore")
    _forget_scenarios()
    multiprocessing.process._parent_process = None  # a script has none
    sys.argv = argv
    if argv[0].endswith(".py"):
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
