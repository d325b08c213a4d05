"""Muon on two processes: each matrix is orthogonalized once, and weights are bitwise those of torch's Muon in one."""

import pytest

from tests.strategy.muon_scenarios import MATRICES, STEPS
from tests.strategy.test_sharded_averages import folder, found  # noqa: F401  # the same launch


@pytest.mark.parametrize(
    ("run", "exchanges", "gathers"), [("shards", 2, 0), ("replicas", 0, 1), ("ddp", 0, 1), ("one", 2, 0)]
)
def test_each_matrix_is_orthogonalized_on_one_rank_in_few_collectives(found, run, exchanges, gathers):  # noqa: F811
    ranks = [rank[f"muon {run}"] for rank in found]
    assert [rank["weights"] for rank in ranks] == [0, 0]
    assert all(rank["all_to_all_single"] == exchanges * STEPS for rank in ranks)
    assert all(rank["all_gather"] == gathers * STEPS for rank in ranks)
    matrices = 1 if run == "one" else MATRICES
    assert sum(rank["matrices"] for rank in ranks) == matrices * STEPS
    # One batch for each of the two shapes.
    assert all(rank["batches"] <= 2 * STEPS for rank in ranks)


def test_momentum_stays_sharded(found):  # noqa: F811
    first, second = (rank["muon shards"] for rank in found)
    assert first["held"] + second["held"] == MATRICES * 35
    assert first["held"] != second["held"]
    assert first["momentum"] == second["momentum"] == 0


def test_a_run_resumes_with_replicas_in_place_of_shards(found):  # noqa: F811
    assert [rank["muon resumed"] for rank in found] == [0, 0]
