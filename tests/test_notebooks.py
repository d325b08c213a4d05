"""The notebooks run from top to bottom, and draw; the long ones under ``pytest -m benchmark`` only."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SMALLER = {  # what stands there, and what is run instead of it
    "01_first_speedup": ("steps=8, batch=32", "steps=4, batch=8", "layers=4, heads=4", "layers=2, heads=2"),
    "03_fit_a_limit": ("context=128, layers=6, heads=4, width=128", "context=128, layers=2, heads=4, width=64"),
    "04_many_devices": ("layers=48", "layers=12", "batch=16, steps=12", "batch=8, steps=4"),
    "06_your_own_technique": ("steps=32", "steps=8", "batch=8", "batch=4"),
    "08_padding": ("= 32, 2000", "= 8, 200", "clamp(8, 256)", "clamp(8, 48)", "rounds=3", "rounds=1"),
}
LONG = dict.fromkeys(("02_qlora", "03_fit_a_limit", "04_many_devices"), pytest.mark.benchmark)


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook", [pytest.param(p, id=name, marks=LONG.get(name, ())) for name, p in NOTEBOOKS.items()]
)
def test_notebooks_run_from_top_to_bottom(notebook, tmp_path):
    arguments = notebook, tmp_path, *SMALLER.get(notebook.stem, ())
    said = run_ranks("tests.support.run_notebook", *arguments, log=tmp_path / "log", count=None, timeout_s=300)
    assert json.loads(said.splitlines()[-1])["image/png"] > 0


def find_name(node, known):
    """What a dotted name stands for, if it begins with something that is imported."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and inspect.ismodule(owner := find_name(node.value, known)):
        return getattr(owner, node.attr)
    return None


def import_names(tree):
    """What the statements of a notebook import, by the names that it has there."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(ast.unparse(node), known)
    return known


def is_ours(found):
    return callable(found) and getattr(found, "__module__", "").startswith("lightning_fasttrain")


def bind_calls(source):
    """Look up each imported name in the source, and bind each call of ours to its signature; return their number."""
    tree = ast.parse(source)
    known, bound = import_names(tree), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            find_name(node, known)
        if isinstance(node, ast.Call) and is_ours(found := find_name(node.func, known)):
            named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(found).bind_partial(*node.args, **named)
            bound += 1
    return bound


@pytest.mark.parametrize("notebook", sorted(LONG))
def test_the_long_notebooks_import_and_call_what_there_is(notebook):
    from tests.support.run_notebook import code_cells, read_smaller

    content = read_smaller(NOTEBOOKS[notebook], *SMALLER.get(notebook, ()))
    assert bind_calls("\n".join(cell.source for cell in code_cells(content))) >= 1


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS))
def test_notebooks_import_public_names_only(notebook):
    content = json.loads(NOTEBOOKS[notebook].read_text())
    source = "\n".join("".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code")
    imported = set(re.findall(r"^\s*(?:from|import) (lightning_fasttrain\S*)", source, re.MULTILINE))
    # All other names are reached from there, where internal ones do not exist.
    assert imported == {"lightning_fasttrain"}


def test_negative_control_a_wrong_name_or_argument_is_found():
    with pytest.raises(AttributeError, match="MicroBatchings"):
        bind_calls("import lightning_fasttrain as ft\nft.MicroBatchings(4)")
    with pytest.raises(TypeError, match="parts"):
        bind_calls("import lightning_fasttrain as ft\nft.MicroBatching(parts=4)")


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
def test_a_notebook_runs_in_a_fresh_kernel(tmp_path):
    from nbclient import NotebookClient

    from tests.support.run_notebook import code_cells, read_smaller

    content = read_smaller(NOTEBOOKS["06_your_own_technique"], *SMALLER["06_your_own_technique"])
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
