"""Two real processes with gloo: what claims DDP keeps its promises there. One launch serves all tests."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ddp") / "found.json"
    run_ranks("tests.support.ddp_scenarios", path, log=path.parent / "log", timeout_s=240)
    return json.loads(path.read_text())


def largest(found, key):
    return max(rank[key] for rank in found)


def test_micro_batches_have_the_gradient_of_the_unsplit_step(found):
    assert largest(found, "micro") < 2e-6
    assert largest(found, "micro+accumulation") < 2e-6
    assert largest(found, "micro agree") == 0


@pytest.mark.parametrize("batches", [1, 2])
def test_the_gradient_noise_scale_is_that_of_the_parts_of_all_ranks(found, batches):
    for rank in found:
        state, expected = rank[f"noise of {batches}"]
        assert [state["signal"], state["noise"]] == pytest.approx(expected, rel=1e-3)
        assert state["measured"] == 1


@pytest.mark.parametrize("how", ["trimmed", "token budget"])
def test_ranks_cut_off_their_own_padding(found, how):
    for rank in found:
        error, disagreement, reductions, saved = rank[how]
        assert error < 2e-6
        assert disagreement == 0
        assert reductions == rank["reductions a step"][0]
        assert saved > 0.1


def test_ranks_run_their_blocks_without_padding(found):
    for rank in found:
        error, disagreement, ran = rank["padding-free"]
        assert error < 2e-6
        assert disagreement == 0
        assert ran


def test_gradients_are_synchronised_once_a_step(found):
    for rank in found:
        for key in ("reductions a step", "reductions a step, accumulating"):
            plain, split = rank[key]
            assert plain == split > 0


def test_a_window_over_ranks_with_unequal_targets_is_one_concatenated_batch(found):
    assert largest(found, "window") < 2e-6
    assert largest(found, "window agree") == 0
    assert largest(found, "fabric window") < 2e-6
    assert {rank["window reductions"] for rank in found} == {3}  # one bucket, three steps


def test_only_rank_zero_prints_the_summaries(found):
    first, second = (rank["said"] for rank in found)
    assert second == []
    assert "24 samples (120 tokens) = 2 ranks × 6 samples × 2 accumulated batches" in first[0]
    assert first[-1].startswith("3 steps\n")


def test_ranks_find_one_rule_though_some_can_compare_nothing(found):
    assert {rank["rule"] for rank in found} == {"its number of targets (labels != -100)"}
    for rank in found:
        assert rank["own count"] is True
        assert "cannot split this loss exactly" in rank["refused"]
    assert largest(found, "one sample") < 2e-6


def test_summed_losses_are_summed_over_parts_batches_and_ranks(found):
    assert largest(found, "summed window") < 2e-6


def test_checkpointing_is_bitwise_and_compiling_close(found):
    assert largest(found, "checkpointing") == 0
    assert largest(found, "compile+checkpointing") < 1e-5


def test_products_in_8_bits_are_synchronised_and_close(found):
    assert 0 < largest(found, "low precision") < 2e-2
    assert largest(found, "low precision agree") == 0


def test_processes_with_unequal_batches_make_one_plan_for_a_memory_budget(found):
    assert largest(found, "budget") == 0
    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["plan checked"] == found[1]["plan checked"] <= 2**30
    assert {action for action, *_ in found[0]["plan"][1]} == {"kept"}


def test_an_adapter_trains_on_all_ranks_alike(found):
    assert largest(found, "adapter") < 2e-6
    assert largest(found, "adapter agree") == 0


def test_all_techniques_without_compiled_blocks_together(found):
    for rank in found:
        difference, between_ranks = rank["together"]
        assert difference < 1e-5
        assert between_ranks == 0


def test_a_step_that_returns_none_is_an_error_on_every_rank(found):
    for rank in found:
        assert "training_step returned None: the other ranks would wait" in rank["none"]


def test_ranks_rehearse_together_and_train_as_if_they_had_not(found):
    assert largest(found, "rehearsed") == 0
    for rank in found:
        assert "MicroBatching: the same" in rank["rehearsal"]["verify"]
        assert "bit for bit" in rank["rehearsal"]["resume"]
    assert "18 × 5" not in found[0]["rehearsal"]["largest batch"]  # it has none, and takes part
    assert "12 × 5, the largest of 5 (the first: 4 × 5), succeeded" in found[1]["rehearsal"]["largest batch"]


def test_a_rank_that_drifts_ends_the_rehearsal_of_all(found):
    one, other = (rank["drifts"] for rank in found)
    assert one == other
    assert one.startswith("on rank 1, a checkpoint was saved and loaded, but differs in weight")  # rank zero's is saved
