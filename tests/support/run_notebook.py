"""Runs the cells of a notebook in this process, as a kernel does.

``python -m tests.support.run_notebook notebook folder [its smaller]...``: a cell, and its replacement.

Started by ``test_notebooks.py`` as a fork of a process that has imported everything, which a kernel takes long to do.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests.support.ranks import Ranks


class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        """Figures go into the outputs, no window is opened."""


def run_forked(command, **settings):
    """Instead of ``subprocess.run``: the script that a cell starts, alone or under torchrun, as forks of this process.

    A real torchrun is started in ``test_examples.py``.
    """
    start = command.index("train.py")
    count = {1: None, 5: 2}[start]  # python train.py; python -m torch.distributed.run --standalone --nproc-per-node=2
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(*command[start:], log=Path(folder, "log"), count=count, of_this_process=True)
        codes, said, errors = ranks.end()
    return subprocess.CompletedProcess(command, next(filter(None, codes), 0), said, errors)


def read_smaller(path, *smaller):
    """A notebook with other sizes than it has."""
    content = nbformat.read(path, as_version=4)
    for size, instead in zip(smaller[::2], smaller[1::2], strict=True):
        assert any(size in cell.source for cell in code_cells(content)), f"no cell has {size!r}"
        for cell in code_cells(content):
            cell.source = cell.source.replace(size, instead)
    return content


def code_cells(content):
    return [cell for cell in content.cells if cell.cell_type == "code"]


def main(path, folder, *smaller):
    """Print how many outputs of each kind its cells have; a cell that fails ends it with its source and its error."""
    cells = code_cells(read_smaller(path, *smaller))
    os.chdir(folder)
    subprocess.run = run_forked
    shell = Shell.instance()
    shell.run_line_magic("matplotlib", "inline")  # a kernel's way to show figures
    kinds = Counter()
    for cell in cells:
        with capture_output() as captured:
            result = shell.run_cell(cell.source)
        if not result.success:
            sys.exit(f"This cell failed:\n{cell.source}\n\n{captured.stdout}{captured.stderr}")
        for output in captured.outputs:
            kinds.update(output.data.keys())
    print(json.dumps(kinds))


if __name__ == "__main__":
    main(*sys.argv[1:])
