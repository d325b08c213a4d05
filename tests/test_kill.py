"""Runs that are killed with SIGKILL over and over end as the uninterrupted one, bit for bit, and lose no checkpoint."""

import json

import pytest

from tests.ranks import run_ranks

# Strategy: processes, kills.
RUNS = {"single": (1, 13), "ddp": (2, 13), "fasttrain_zero": (2, 7), "fasttrain_fsdp2": (2, 7)}


@pytest.fixture(scope="module", params=RUNS)
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    processes, kills = RUNS[request.param]
    arguments = request.param, processes, kills, folder
    run_ranks("tests.kill_scenarios", *arguments, log=folder / "log", count=None, timeout_s=300)
    return json.loads((folder / "found.json").read_text())


def test_the_end_is_that_of_the_uninterrupted_run(found):
    assert len(found["killed"]["moments"]) >= 7
    assert found["killed differs in"] == []


def test_no_checkpoint_is_lost(found):
    for trained, resumed in found["killed"]["resumed"]:
        assert trained - found["saved every"] <= resumed <= trained  # the save after the last may have been killed


def test_negative_control_without_exact_resume_the_end_is_another(found):
    assert len(found["without differs in"]) > 0
