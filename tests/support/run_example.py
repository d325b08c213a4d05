"""Runs an example: its script, with its arguments, in a process of its own."""

import tempfile
from pathlib import Path

from tests.support.ranks import ROOT, run_ranks


def last_line(script, *arguments, ranks=None, smaller=()):
    """The last line that it prints.

    Args:
        script: in ``examples/``.
        arguments: of its command line.
        ranks: how many processes of one run; None for one that is no rank.
        smaller: pairs of what stands there, and what is run instead of it.
    """
    path = ROOT / "examples" / script
    source = path.read_text()
    for size, instead in smaller:
        assert size in source, f"{script} has no {size!r}"
        source = source.replace(size, instead)
    with tempfile.TemporaryDirectory() as folder:
        if smaller:
            path = Path(folder, path.name)
            path.write_text(source)
        said = run_ranks(str(path), *arguments, log=Path(folder, "log"), count=ranks, timeout_s=600)
    return said.strip().splitlines()[-1]
