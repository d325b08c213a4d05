"""Two real processes with gloo, one of which has a fault. One launch serves all tests."""

import json
import re

import pytest

from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("steady") / "found.json"
    run_ranks("tests.guards.steady_scenarios", path, log=path.parent / "log", timeout_s=240)
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_nan_of_one_rank_is_skipped_by_both_and_named(found, kind):
    for difference, skipped, _ in (rank[f"nan, {kind}"] for rank in found):
        assert (difference, skipped) == (0, 1)
    first, second = (rank[f"nan, {kind}"][2] for rank in found)
    assert second == []
    assert re.search("epoch 0, batch 4, rank 1, the non-finite value could not be reproduced", first[0])


def test_a_bad_loss_without_a_bad_gradient_is_skipped_by_both(found):
    assert [rank["loss alone"][0] for rank in found] == [0, 0]
    assert "batch 4, rank 1" in found[0]["loss alone"][1][0]


def test_both_ranks_stop(found):
    assert all("batch 4, rank 1" in rank["stopped"] for rank in found)


def test_ranks_with_sharded_gradients_agree(found):
    assert [rank["sharded"][0] for rank in found] == [0, 0]
    assert re.search("batch 4, rank 1, in the gradient of", found[0]["sharded"][1][0])
    assert [rank["sharded spike"] for rank in found] == [[0, 1], [0, 0]]


def test_a_spike_of_one_rank_is_skipped_by_both(found):
    assert [rank["spike"][:2] for rank in found] == [[0, 1], [0, 1]]
    assert "batch 5" in found[0]["spike"][2][0]


def test_both_ranks_rewind_to_the_last_checkpoint(found):
    assert [rank["rewound"][:2] for rank in found] == [[0, 1], [0, 1]]
    assert found[0]["rewound"][2] == 2


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_epochs_end_after_the_batches_of_the_shorter_rank(found, kind):
    assert [rank[f"even, {kind}"] for rank in found] == [[0, 10, 2]] * 2


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_a_resumed_run_continues_with_the_same_batches(found, kind):
    assert [rank[f"even and resumed, {kind}"] for rank in found] == [[0, 10]] * 2


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_even_loaders_resume_in_a_bare_loop_with_the_rest_of_a_pass_and_then_a_whole_one(found, kind):
    whole = list(range(5))
    expected = [[whole[done:], whole] for done in range(1, 6)] + [[whole, whole]]
    assert [rank[f"even by hand and resumed, {kind}"] for rank in found] == [expected, expected]


def test_the_last_window_has_the_same_length_on_both_ranks(found):
    assert [rank["even windows"] for rank in found] == [[0, 3]] * 2


def test_even_loaders_in_a_bare_loop_stop_together_and_count_leftover_batches(found):
    assert [rank["even, by hand"] for rank in found] == [[5, 5, 1], [5, 5, 0]]


def test_bad_samples_are_counted_by_the_rank_that_has_them(found):
    assert [rank["bad samples"][:2] for rank in found] == [[0, 3], [2, 3]]
    assert [rank["bad samples, resumed"] for rank in found] == [0, 2]
    assert "rank 1: sample 3, read by" in found[1]["bad samples"][2][0]


def test_the_slow_rank_is_named_with_its_slow_phase(found):
    first, second = (rank["slow"] for rank in found)
    slow = (
        r"rank 1 \(.*\) takes 110 ms until its backward where the others take 10 \(11 times .* most of it data_wait\)"
    )
    assert [bool(re.search(slow, one)) for one in first] == [True, True]  # after 4 steps, and after 8
    assert second == found[0]["not asked"] == []
