"""One launch of one process and one of two, side by side, for all tests of ZeRO and of its checkpoints."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


Found = dict[int, list[dict[str, Any]]]


def launched(factory: Any) -> tuple[Found, Path]:
    """What was found: number of processes → of each rank; and the folder with the checkpoints they left."""
    return _launch(factory.getbasetemp() / "zero")


@functools.cache
def _launch(folder: Path) -> tuple[Found, Path]:
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launches = {}
    for ranks in (1, 2):
        scenarios = [*command, f"--nproc-per-node={ranks}", "-m", "tests.strategy.zero_scenarios", str(folder)]
        with open(folder / f"log-{ranks}", "w") as log:
            launches[ranks] = subprocess.Popen(scenarios, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        for ranks, launch in launches.items():
            assert launch.wait(timeout=420) == 0, (folder / f"log-{ranks}").read_text()[-4000:]
    finally:
        for launch in launches.values():
            launch.terminate()  # torchrun ends its processes
    return {ranks: json.loads((folder / f"found-{ranks}.json").read_text()) for ranks in launches}, folder
