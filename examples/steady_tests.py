"""Run the tests again and again, under other conditions each time, and write down which failed when.

    python examples/steady_tests.py --runs 20 --out STEADY.json
    python examples/steady_tests.py --runs 20 --out STEADY.json -- -m quick

Half of the runs share the machine with a process that keeps one core busy; a quarter have torch's kernels for older
processors, by ``ATEN_CPU_CAPABILITY``; in every second one the test files come in random order. The file is written
after each run, with its commit, so that nothing is lost when it is stopped; a run that is on file is not repeated, and
a file goes on only on the hardware and with the versions that it names.
Arguments after ``--`` are those of pytest, after the README's own.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
SEED = "STEADY_TESTS_SEED"


def pytest_collection_modifyitems(items):
    """Shuffle the files of tests; this file is a plugin of the runs that it starts."""
    seed = os.environ.get(SEED)
    if seed is not None:
        files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
        random.Random(int(seed)).shuffle(files)  # the same order in each worker, as pytest-xdist requires
        items[:] = [item for tests in files for item in tests]


def conditions_of(run):
    """Return what differs in a run: a busy neighbour, the kernels of torch, and the seed of the order."""
    return {
        "busy_neighbour": run % 2 == 1,
        "kernels": {0: "default", 2: "avx2"}.get(run % 8, ""),
        "order": run if run % 4 in (1, 2) else None,
    }


@contextmanager
def busy_core():
    """Keep one core busy by another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_tests(conditions, arguments):
    """Return the outcome of one run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if conditions["kernels"]:
        environment["ATEN_CPU_CAPABILITY"] = conditions["kernels"]
        # Inductor's cache does not tell code for one processor from code for another.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"inductor_{conditions['kernels']}"))
    if conditions["order"] is not None:
        environment[SEED] = str(conditions["order"])
    command = [*TESTS, "-p", "examples.steady_tests", *arguments]
    began = time.monotonic()
    with ExitStack() as around:
        if conditions["busy_neighbour"]:
            around.enter_context(busy_core())
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    counted = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    ended = done.stdout.strip().splitlines()[-1:]
    return {"seconds": round(time.monotonic() - began), "code": done.returncode, **counted, "failed_tests": failed} | (
        {} if done.returncode == 0 else {"last_line": ended}
    )


def name_commit():
    """Return the commit of the repository; "" where it is no repository."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main():
    own = sys.argv[1:]
    arguments = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    sys.path.insert(0, str(ROOT))
    from lightning_fasttrain.core.atomic_write import write_atomic
    from lightning_fasttrain.core.device import hardware, versions

    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    where = {"hardware": hardware(), "versions": versions(), "arguments": arguments}
    differs = [name for name in where if found.get(name, where[name]) != where[name]]
    if differs:
        parser.error(f"{options.out} has other {' and '.join(differs)} than here; its runs do not count with new ones.")
    found |= where
    runs = found.setdefault("runs", [])
    for run in range(len(runs), options.runs):
        conditions = conditions_of(run)
        outcome = run_tests(conditions, arguments)
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        runs.append({"date": ended, "commit": name_commit(), **conditions, **outcome})
        write_atomic(options.out, json.dumps(found, indent=1) + "\n")
        said = ", ".join(f"{key} {value}" for key, value in conditions.items() if value not in ("", None, False))
        failed = ", ".join(outcome["failed_tests"]) or "all passed"
        print(f"run {run + 1} of {options.runs} ({said or 'plain'}): {outcome['seconds']} s, {failed}", flush=True)
    bad = sum(run["code"] != 0 for run in runs)
    print(f"{len(runs) - bad} of {len(runs)} runs passed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
