"""Run by three processes (see test_cluster_check.py): checks of a cluster with faults, the last of which hangs."""

import json
import os
import sys
import time
from pathlib import Path

from lightning_fasttrain.strategy import cluster_check
from lightning_fasttrain.strategy.cluster_check import check_cluster

RANK, PORT = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])


def check(name, folder, number, **settings):
    """Write what is found, or the error."""
    os.environ["MASTER_PORT"] = str(PORT + number)
    try:
        report = check_cluster(**{"timeout_s": 30, "folder": folder, "mib": 1, **settings})
        found = {"findings": report.findings, "pairs": {str(k): v for k, v in report.pairs.get("gloo", {}).items()}}
        found["text"] = str(report)
    except TimeoutError as error:
        found = {"error": str(error)}
    (folder / f"{name}-{RANK}.json").write_text(json.dumps(found))


def main(folder):
    folder = Path(folder)
    check("whole", folder, 0)
    code = folder / f"code-{RANK == 2}"
    code.mkdir(exist_ok=True)
    (code / "model.py").write_text(f"layers = {RANK == 2}")
    now = time.time
    time.time = lambda: now() + 100 * (RANK == 1)
    check("faults", folder, 1, code=code)
    time.time = now
    if RANK != 1:
        check("missing", folder, 2, timeout_s=2)
    while not (folder / "missing-0.json").exists():
        time.sleep(0.05)
    if RANK == 2:
        cluster_check._measure_disk = lambda *_: time.sleep(60)
    check("hang", folder, 3, timeout_s=4)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
