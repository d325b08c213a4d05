"""Runs that are killed with SIGKILL over and over end as the uninterrupted one, bit for bit, and lose no checkpoint."""

import json

import pytest

from tests.support.ranks import Ranks

# Strategy: processes, kills.
RUNS = {"single": (1, 13), "ddp": (2, 7), "fasttrain_zero": (2, 7), "fasttrain_fsdp2": (2, 7)}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """All at the same time: most of it they wait."""
    launches = {}
    for strategy, (processes, kills) in RUNS.items():
        folder = tmp_path_factory.mktemp(strategy)
        arguments = strategy, processes, kills, folder
        launches[strategy] = folder, Ranks("tests.support.kill_scenarios", *arguments, log=folder / "log", count=None)
    yield launches
    for _, launch in launches.values():
        launch.stop()


@pytest.fixture(scope="module", params=RUNS)
def found(request, launched):
    folder, launch = launched[request.param]
    launch.wait(timeout_s=300)
    return json.loads((folder / "found.json").read_text())


def test_the_end_is_that_of_the_uninterrupted_run(found):
    assert len(found["killed"]["moments"]) >= 7
    assert found["killed differs in"] == []


def test_no_checkpoint_is_lost(found):
    for trained, resumed in found["killed"]["resumed"]:
        assert trained - found["saved every"] <= resumed <= trained  # the save after the last may have been killed


def test_negative_control_without_exact_resume_the_end_is_another(found):
    assert len(found["without differs in"]) > 0
