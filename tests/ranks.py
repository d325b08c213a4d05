"""Starts the ranks of a test as torchrun would, but as forks of one process that has imported everything.

Importing takes longer than most of what they do. What a launcher itself must do is tested with real ones, in
``guard_scenarios.py`` and ``test_examples.py``.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Ranks:
    """Processes that run ``python -m module arguments`` as the ranks of one run.

    Args:
        module: with a ``__main__`` part; or the path of a script.
        arguments: of its command line.
        log: a file for what the ranks print.
        count: how many.
    """

    def __init__(self, module: str, *arguments: object, log: Path, count: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.cases"])
        self.log = log
        self.log.touch()
        launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
        launch |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
        argv = [module, *map(str, arguments)]
        self.processes = []
        for rank in range(count):
            own = {**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_be_a_rank, args=(argv, own, log))
            process.start()
            self.processes.append(process)

    def wait(self, timeout_s: float = 240) -> str:
        """What they printed, once all have ended well; one that failed, or is too slow, ends them all."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and {process.exitcode for process in self.processes} == {None}:
            time.sleep(0.05)
        failed = [process.exitcode for process in self.processes if process.exitcode]
        for process in self.processes:
            process.join(0 if failed else max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.stop()
        said = self.log.read_text()
        assert codes == [0] * len(codes), f"exit codes {codes} (None: after {timeout_s} s)\n{said[-6000:]}"
        return said

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(module: str, *arguments: object, log: Path, count: int = 2, timeout_s: float = 240) -> str:
    """What :class:`Ranks` print."""
    return Ranks(module, *arguments, log=log, count=count).wait(timeout_s)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _be_a_rank(argv: list[str], environment: dict[str, str], log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    warnings.simplefilter("ignore")
    sys.argv = argv
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
