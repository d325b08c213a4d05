"""Runs that are killed, signalled, out of disk, spoiled or slowed down end as the unbroken one, bit for bit.

Some of the faults of ``examples/kill_campaign.py``, which has hundreds of them, with a seed.
"""

import json

import pytest

from tests.support.ranks import ROOT, Ranks

# Strategy: faults, and the seed for which they include the kinds of KINDS.
RUNS = {"single": (5, 4), "ddp": (4, 1), "fsdp2": (3, 2), "zero3": (2, 16)}
KINDS = {"SIGKILL", "SIGTERM", "full disk", "NaN batch", "slow rank"}


def start(folder, *arguments):
    script = str(ROOT / "examples" / "kill_campaign.py")
    return Ranks(script, "--file-limit", "--out", folder / "out.json", *arguments, log=folder / "log", count=None)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """All at the same time: most of it they wait."""
    launches = {}
    for strategy, (kills, seed) in RUNS.items():
        folder = tmp_path_factory.mktemp(strategy)
        launch = start(folder, "--kills", kills, "--seed", seed, "--strategies", strategy)
        launches[strategy] = folder, launch
    yield launches
    for _, launch in launches.values():
        launch.stop()


@pytest.fixture(scope="module", params=RUNS)
def found(request, launched):
    folder, launch = launched[request.param]
    codes, said, errors = launch.end(timeout_s=300)
    assert (folder / "out.json").exists(), (codes, said, errors)
    return json.loads((folder / "out.json").read_text())


def test_the_end_is_that_of_the_unbroken_run_and_no_checkpoint_is_lost(found):
    assert found["troubled_runs"] == []
    assert found["kills"] == sum(row["kills"] for row in found["rows"]) >= 2


def test_each_kind_of_fault_happens(launched):
    kinds = set()
    for folder, launch in launched.values():
        launch.end(timeout_s=300)
        for row in json.loads((folder / "out.json").read_text())["rows"]:
            kinds |= row["kinds"].keys()
    assert kinds >= KINDS


def test_control_without_exact_resume_the_end_is_another(tmp_path):
    launch = start(tmp_path, "--kills", 1, "--strategies", "single", "--careless")
    codes, _, errors = launch.end()
    assert codes == [1], errors
    (run,) = json.loads((tmp_path / "out.json").read_text())["troubled_runs"]
    assert "weights" in " ".join(run["differs"])
