"""The example measures a noise scale on real text, and its figures in the documentation are the measured ones."""

import importlib
import json
import math

import pytest

from tests.support.run_example import ROOT

RESULTS = ROOT / "examples" / "results"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("critical_batch_size")


def test_the_documented_figures_are_the_measured_ones(example):
    rows = json.loads((RESULTS / "critical_batch_size_cpu.json").read_text())["rows"]
    text = (RESULTS / "README.md").read_text()
    written = text.split("<!-- noise -->\n")[1].split("\n<!-- /noise -->")[0].splitlines()[2:]
    assert written == [f"| {' | '.join(example.as_cells(row))} |" for row in rows]
    noise = [row["noise scale, bytes"] for row in rows]
    assert noise == sorted(noise)


def test_the_example_measures(example):
    (row,) = example.train(100)
    assert row["step"] == 100
    assert 0 < row["noise scale, bytes"] < math.inf
