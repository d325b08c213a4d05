"""On several ranks the first is watched, and told which one it waits for."""

import json

import pytest

from tests.support.ranks import run_ranks


def test_a_slow_rank_and_a_search_for_nothing_are_found(tmp_path):
    run_ranks("tests.doctor.slow_rank", tmp_path / "found.json", log=tmp_path / "log")
    report = json.loads((tmp_path / "found.json").read_text())
    found = {finding["kind"]: finding for finding in report["findings"]}
    uneven = found["uneven_ranks"]
    assert "wait for rank 1" in uneven["what"]
    assert uneven["cost"]["value"] == pytest.approx(30)
    assert "unused_search" in found
