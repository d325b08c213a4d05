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
    "LitGPT": ("MicroBatching", "FusedLossHead", "AdaptiveClipping", "ExactResume"),
    "x-transformers": ("ActivationCheckpointing", "OptimizerInBackward"),
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


@pytest.mark.parametrize("found", ["foreign_modules_cpu", "foreign_settings_cpu"])
def test_the_whole_product_was_found_without_a_defect(found):
    report = json.loads((ROOT / "examples" / "results" / f"{found}.json").read_text())
    cells = [cell for row in report["rows"].values() for cell in row.values()]
    assert len(cells) == sum(report["cells"].values()) > 100
    assert not any(cell.startswith("DEFECT") for cell in cells)
