"""A user's script, started as the commands start it, but as a fork of a process that has imported everything."""

import tempfile
from pathlib import Path

from lightning_fasttrain.cli.rehearsal.run_script import write_entry_point
from tests.support.ranks import Ranks


def start_fork(script, arguments, point, orders, *, quiet=False):
    """As ``run_script`` does it, which ``test_rehearse_command.py`` tries out; in the script's folder."""
    with tempfile.TemporaryDirectory() as name:
        write_entry_point(Path(name), point)
        program, argv = Path(name) / "start.py", [str(Path(script).absolute()), *arguments]
        start = f"runpy.run_path({argv[0]!r}, run_name='__main__')"
        folder = Path(argv[0]).parent
        if script == "-c":
            start, argv = arguments[0], ["-c", str(Path(arguments[1]).absolute()), *arguments[2:]]
            folder = Path(argv[1]).parent
        program.write_text(
            f"import os, runpy, sys\nos.environ |= {dict(orders)}\nsys.path[:0] = ['', {name!r}]\nsys.argv = {argv}\n"
            f"os.chdir({str(folder)!r})\n{start}\n"
        )
        (code,), _, _ = Ranks(str(program), log=Path(name) / "log", count=None).end()
        return code
