"""The notebooks run from top to bottom, and draw."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
FOR_MINUTES = {"02_qlora": pytest.mark.benchmark}


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook", [pytest.param(p, id=name, marks=FOR_MINUTES.get(name, ())) for name, p in NOTEBOOKS.items()]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
def test_notebooks_run_from_top_to_bottom(notebook, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(content, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
