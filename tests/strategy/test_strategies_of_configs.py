"""Strategies whose settings come from Hydra's configs, on two processes: they train, save and resume."""

import json

import pytest

from tests.strategy.config_scenarios import REFUSED, RUNS
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    run_ranks("tests.strategy.config_scenarios", folder / "found.json", folder, log=folder / "log")
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(("case", "run"), [(case, run.__name__) for case, run in RUNS])
def test_strategies_of_configs_train_save_and_resume(found, case, run):
    for rank in found:
        seen = rank[f"{run} {case}"]
        assert seen["foreign"] == []
        assert seen["to plain PyTorch"] < 1e-4
        assert seen["to resumed"] == 0
        steps = 2 if run == "loop" else 4  # a loop counts epochs
        assert seen["steps"] == [steps, steps]


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_among_hyper_parameters_is_refused_before_the_first_step(found, case):
    for rank in found:
        message, steps = rank[f"refused {case}"]
        assert "of class DictConfig" in message
        assert steps == 0
