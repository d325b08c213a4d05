"""The notebooks run from top to bottom, and draw."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SMALLER = {  # what stands there, and what is run instead of it
    "01_first_speedup": ("steps=8, batch=32", "steps=4, batch=8"),
    "03_fit_a_limit": ("context=128, layers=6, heads=4, width=128", "context=128, layers=2, heads=4, width=64"),
    "04_many_devices": ("layers=48", "layers=12", "batch=16, steps=12", "batch=8, steps=4"),
    "06_your_own_technique": ("steps=32", "steps=8", "batch=8", "batch=4"),
    "08_padding": ("= 32, 2000", "= 8, 200", "clamp(8, 256)", "clamp(8, 48)", "rounds=3", "rounds=1"),
}
FOR_MINUTES = {"02_qlora": pytest.mark.benchmark}
IN_A_KERNEL = NOTEBOOKS.pop("06_your_own_technique")  # one is enough: what takes long is to import everything again


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook", [pytest.param(p, id=name, marks=FOR_MINUTES.get(name, ())) for name, p in NOTEBOOKS.items()]
)
def test_notebooks_run_from_top_to_bottom(notebook, tmp_path):
    arguments = notebook, tmp_path, *SMALLER.get(notebook.stem, ())
    said = run_ranks("tests.support.run_notebook", *arguments, log=tmp_path / "log", count=None, timeout_s=300)
    assert json.loads(said.splitlines()[-1])["image/png"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
def test_a_notebook_runs_in_a_fresh_kernel(tmp_path):
    from nbclient import NotebookClient

    from tests.support.run_notebook import code_cells, read_smaller

    content = read_smaller(IN_A_KERNEL, *SMALLER[IN_A_KERNEL.stem])
    client = NotebookClient(content, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in code_cells(content) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_a_cell_that_fails_is_shown_with_its_error(tmp_path):
    import nbformat

    cells = [nbformat.v4.new_code_cell("x = 1"), nbformat.v4.new_code_cell("x / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    with pytest.raises(AssertionError, match=r"This cell failed:\nx / 0\n[^$]*ZeroDivisionError"):
        run_ranks("tests.support.run_notebook", tmp_path / "a.ipynb", tmp_path, log=tmp_path / "log", count=None)
