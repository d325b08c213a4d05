"""Runs an example as a new user runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def last_line(script, *arguments, launcher=()):
    run = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip().splitlines()[-1]
