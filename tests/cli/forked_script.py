"""A user's script, started as the commands start it, but as a fork of a process that has imported everything."""

import tempfile
from pathlib import Path

from lightning_fasttrain.cli.rehearsal.run_script import write_entry_point
from tests.support.ranks import Ranks


def start_fork(script, arguments, point, orders, *, quiet=False):
    """As ``run_script`` does it, which ``test_rehearse_command.py`` tries out; in the script's folder."""
    with tempfile.TemporaryDirectory() as name:
        write_entry_point(Path(name), point)
        program, script = Path(name) / "start.py", str(Path(script).absolute())
        argv = [script, *arguments]
        program.write_text(
            f"import os, runpy, sys\nos.environ |= {dict(orders)}\nsys.path.insert(0, {name!r})\nsys.argv = {argv}\n"
            f"os.chdir({str(Path(script).parent)!r})\nrunpy.run_path({script!r}, run_name='__main__')\n"
        )
        (code,), _, _ = Ranks(str(program), log=Path(name) / "log", count=None).end()
        return code
