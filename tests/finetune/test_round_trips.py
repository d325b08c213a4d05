"""A trained adapter is the same after every round trip, or is refused when it is added.

The cases are every layer class × adapter kind × form of target × base; the default suite reads a seeded extract, and
``pytest -m benchmark tests/finetune/test_round_trips.py`` all of them.
"""

import random

import pytest
import torch

from tests.support.ranks import run_ranks

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
adapter_nets = pytest.importorskip("tests.support.adapter_nets")
adapter_cases = pytest.importorskip("tests.support.adapter_cases")
pytestmark = pytest.mark.filterwarnings("ignore")
CASES = list(adapter_nets.every_case())
EXTRACT = random.Random(11).sample(CASES, 48)


def wrong_in(cases, folder):
    """Cases with a round trip that differs, and the number of those that were added."""
    wrong, added = {}, 0
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir()
        found = adapter_cases.round_trips(case, folder / str(number))
        added += "refused" not in found
        if found and "refused" not in found:
            wrong[str(case)] = found
    return wrong, added


def test_an_extract_of_all_cases_is_equal_after_each_round_trip_or_refused(tmp_path):
    wrong, added = wrong_in(EXTRACT, tmp_path)
    assert wrong == {}
    assert added >= 12
    said = run_ranks("tests.support.adapter_cases", tmp_path, log=tmp_path / "log", count=None)
    assert said.strip() == "loaded all"


def test_each_base_layer_and_kind_is_added_somewhere():
    for field in ("layer", "kind", "form", "base"):
        assert {getattr(case, field) for case in CASES} == set(getattr(adapter_nets, f"{field.upper()}S"))


@pytest.mark.parametrize("layer", ["Conv1d", "Embedding", "LayerNorm"])
def test_an_initialization_for_linear_layers_is_refused_before_it_changes_any(layer, tmp_path):
    case = adapter_nets.Case(layer, "pissa", "list", "float32")
    assert (
        "PEFT computes this initialization for linear layers alone"
        in adapter_cases.round_trips(case, tmp_path)["refused"]
    )


def test_a_round_trip_that_loses_something_is_noticed(tmp_path, monkeypatch):
    """The control."""
    load = adapter_cases.load_adapter_

    def forgetful(model, folder):
        load(model, folder)
        with torch.no_grad():
            model.part.lora_B["default"].weight.zero_()

    monkeypatch.setattr(adapter_cases, "load_adapter_", forgetful)
    found = adapter_cases.round_trips(adapter_nets.Case("Linear", "lora", "name", "float32"), tmp_path)
    assert "load" in found


@pytest.mark.benchmark
@pytest.mark.parametrize("base", adapter_nets.BASES)
@pytest.mark.parametrize("layer", adapter_nets.LAYERS)
def test_all_cases(layer, base, tmp_path, capsys):
    cases = [case for case in CASES if (case.layer, case.base) == (layer, base)]
    wrong, added = wrong_in(cases, tmp_path)
    with capsys.disabled():
        print(f"\n{layer}, {base}: {len(cases)} cases, {added} added, {len(wrong)} wrong")
    assert wrong == {}
