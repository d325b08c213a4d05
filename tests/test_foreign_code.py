"""Modules and settings of other projects train to the same weights with our callbacks, or are refused.

An extract of ``examples/foreign_code.py``, which tries all of them; what it found is in ``examples/results/``.
"""

import importlib
import json
import warnings

import pytest
import torch

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
    "nanoGPT, StochasticWeightAveraging": ("FusedLossHead", "EagerGradientRelease", "WeightEMA"),
    "nanoGPT, bf16-mixed": ("MicroBatching", "FusedLossHead"),
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
    cells = foreign.product(["GAN"], ["MicroBatching", "OptimizerInBackward", "PaddingFree"], tmp_path)["GAN"]
    assert "accumulate_gradients(step, batch" in cells["MicroBatching"]
    assert "optimize_in_backward_(optimizer)" in cells["OptimizerInBackward"]
    assert "remove_padding_(model)" in cells["PaddingFree"]


def test_in_bf16_micro_batches_have_the_gradient_that_a_loop_sums(foreign):
    module, data = foreign.build("nanoGPT")
    batch = [tensor[:4] for tensor in data.tensors]

    def step(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return module.model(*batch)[1]

    def gradient(run):
        module.zero_grad()
        run()
        return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

    def sum_halves():
        for half in (slice(2), slice(2, 4)):
            (step([tensor[half] for tensor in batch]) / 2).backward()

    unsplit = gradient(lambda: step(batch).backward())
    found = gradient(lambda: ft.accumulate_gradients(step, batch, 2))
    assert torch.equal(found, gradient(sum_halves))
    # Each half's gradient is rounded to bfloat16: that is all of the difference.
    assert 0 < (found - unsplit).norm() / unsplit.norm() < foreign.ROUNDED


def test_control_a_technique_that_changes_weights_is_a_defect(foreign, tmp_path, monkeypatch):
    monkeypatch.setitem(foreign.TECHNIQUES, "clips", (lambda: ft.optim.WeightClipping(0.01), foreign.EXACT))
    assert foreign.product(["nanoGPT"], ["clips"], tmp_path)["nanoGPT"]["clips"].startswith("DEFECT: differs")


def test_the_table_of_the_whole_product_is_what_was_found():
    results = ROOT / "examples" / "results"
    written = (results / "README.md").read_text().split("<!-- foreign -->\n")[1].split("\n<!-- /foreign")[0]
    kinds = ("equal", "within the bound", "trains", "did nothing", "refused", "no checkpoint", "DEFECT")
    expected = []
    tables = {"modules of libraries": "foreign_libraries_cpu", "other modules": "foreign_modules_cpu"}
    tables["settings, each with nanoGPT"] = "foreign_settings_cpu"
    for title, name in tables.items():
        found = json.loads((results / f"{name}.json").read_text())
        counts = [found["cells"].get(kind, 0) for kind in kinds]
        assert sum(counts) + found["cells"].get("ok", 0) == sum(map(len, found["rows"].values()))
        assert counts[-1] == 0
        expected.append(f"| {' | '.join(map(str, [title, len(found['rows']), *counts]))} |")
    assert written.splitlines()[2:] == expected


def test_what_is_said_of_verified_stacks_is_what_was_found():
    rows = json.loads((ROOT / "examples" / "results" / "foreign_libraries_cpu.json").read_text())["rows"]
    verified = [cell for row in rows.values() for name, cell in row.items() if name.endswith(", verified")]
    assert all(cell.startswith("ok") for cell in verified)
    said = f"of {len(verified)}, all are the same in double precision, and {verified.count('ok')} in float32"
    assert said in " ".join((ROOT / "examples" / "results" / "README.md").read_text().split())
