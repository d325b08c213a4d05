"""Modules and settings of other projects train to the same weights with our callbacks, or are refused.

An extract of ``examples/foreign_code.py``, which tries all of them; what it found is in ``examples/results/``.
"""

import importlib
import json
import warnings

import pytest

import lightning_fasttrain as ft
from tests.support.ranks import ROOT

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EXTRACT = {
    "LitGPT's GPT": ("MicroBatching", "FusedLossHead", "AdaptiveClipping", "ExactResume"),
    "x-transformers' Decoder": ("ActivationCheckpointing", "OptimizerInBackward"),
    "Hydra template": ("MicroBatching", "SpikeGuard"),
    "GAN": ("FiniteGuard", "ExactResume", "LoRA"),
    "nanoGPT, CombinedLoader, max_size_cycle": ("FusedLossHead", "EagerGradientRelease"),
    "nanoGPT, StochasticWeightAveraging": ("FusedLossHead", "several"),
}


@pytest.fixture
def foreign(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with warnings.catch_warnings():
        return importlib.import_module("foreign_code")


@pytest.mark.parametrize("row", EXTRACT)
def test_modules_of_others_train_to_the_same_weights(row, foreign, tmp_path):
    cells = foreign.product([row], EXTRACT[row], tmp_path)[row]
    assert [cell for cell in cells.values() if cell.startswith(("DEFECT", "refused", "no checkpoint"))] == []


def test_manual_optimization_is_refused_with_the_function_to_call(foreign, tmp_path):
    cells = foreign.product(["GAN"], ["MicroBatching", "OptimizerInBackward"], tmp_path)["GAN"]
    assert "accumulate_gradients(step, batch" in cells["MicroBatching"]
    assert "optimize_in_backward_(optimizer)" in cells["OptimizerInBackward"]


def test_control_a_technique_that_changes_weights_is_a_defect(foreign, tmp_path, monkeypatch):
    monkeypatch.setitem(foreign.TECHNIQUES, "clips", (lambda: ft.optim.WeightClipping(0.01), foreign.EXACT))
    assert foreign.product(["nanoGPT"], ["clips"], tmp_path)["nanoGPT"]["clips"].startswith("DEFECT: differs")


def test_the_table_of_the_whole_product_is_what_was_found():
    results = ROOT / "examples" / "results"
    written = (results / "README.md").read_text().split("<!-- foreign -->\n")[1].split("\n<!-- /foreign")[0]
    kinds = ("equal", "within the bound", "trains", "refused", "no checkpoint", "DEFECT")
    expected = []
    for title, name in (("modules", "foreign_modules_cpu"), ("settings, each with nanoGPT", "foreign_settings_cpu")):
        found = json.loads((results / f"{name}.json").read_text())
        counts = [found["cells"].get(kind, 0) for kind in kinds]
        assert sum(counts) == sum(map(len, found["rows"].values()))
        assert counts[-1] == 0
        expected.append(f"| {' | '.join(map(str, [title, len(found['rows']), *counts]))} |")
    assert written.splitlines()[2:] == expected
