"""One of two ranks fails, is killed, is missing or has a full disk: all exit or continue together. Real processes."""

import pytest

from lightning_fasttrain.core.files.checkpoint_folder import verify_checkpoint
from tests.strategy.failing_ranks import run_scenarios


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_scenarios(tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("fails_in_configure_model", [1, 1]),
        ("fails_in_configure_optimizers", [1, 1]),
        ("fails_under_fsdp2", [1, 1]),
        ("killed_while_starting", [1, -9]),
        ("killed_in_fabric", [1, -9]),
        ("killed_in_deepspeed", [1, -9]),
        ("fails_in_deepspeed", [1, 1]),
        ("does_not_come", [1, 1]),
    ],
)
def test_all_ranks_exit_if_one_fails(seen, name, codes):
    assert seen[name]["codes"] == codes, seen[name]["err"]


@pytest.mark.parametrize(
    ("name", "failing", "where"),
    [
        ("fails_in_configure_model", 1, "configure_model"),
        ("fails_in_configure_optimizers", 0, "configure_optimizers"),
        ("fails_under_fsdp2", 1, "configure_optimizers"),
    ],
)
def test_failing_rank_shows_its_error_and_the_other_refers_to_it(seen, name, failing, where):
    said = seen[name]["err"]
    assert f"rank {failing} failed:\n" in said[failing]
    assert "FileNotFoundError: there are no weights on this host" in said[failing]
    assert f"RuntimeError: {where} failed on another rank" in said[1 - failing]


def test_error_is_shown_before_its_rank_waits_for_others(seen):
    assert seen["fails_in_configure_model"]["found"][0] == {"said while rank 1 waits": True}


@pytest.mark.parametrize("name", ["killed_while_starting", "killed_in_fabric", "does_not_come"])
def test_missing_or_late_rank_is_an_error_on_the_others(seen, name):
    assert "RuntimeError: a rank is gone, or did not answer in time" in seen[name]["err"][0]


def test_rank_that_is_lost_in_deepspeed_is_named_long_before_the_timeout(seen):
    assert "rank 1 failed or is gone in deepspeed.initialize" in seen["killed_in_deepspeed"]["err"][0]
    assert "FileNotFoundError: there are no weights on this host" in seen["fails_in_deepspeed"]["err"][0]


def test_full_disk_is_an_error_on_all_ranks_and_training_can_continue(seen):
    case = seen["has_full_disk"]
    assert case["codes"] == [0, 0], case["err"]
    for found in case["found"]:
        for strategy in ("zero 2", "zero 3", "fsdp2"):
            for which in ("both", "rank 0", "rank 1"):
                kind, _, seconds = found[f"{strategy}, {which}"]
                assert kind == "OSError"
                assert seconds < 30  # no rank hangs in a barrier that the other never reaches
            assert found[f"{strategy}, left"] == []
            assert found[f"{strategy}, steps"] == 4
    for i, said in enumerate(case["err"]):
        assert f"rank {i} failed:\n" in said
        assert "could not be written" in said
    assert list(case["folder"].glob(".fasttrain*")) == []


def test_unsavable_state_is_an_immediate_error_on_all_ranks(seen):
    case = seen["cannot_save"]
    assert case["codes"] == [0, 0], case["err"]
    for found in case["found"]:
        for strategy in ("zero 2", "zero 3", "fsdp2", "ddp"):
            kind, text, seconds = found[f"{strategy}, folder"]
            assert kind == "OSError", text
            assert "file/checkpoints: Not a directory" in text
            assert seconds < 30
            kind, text, seconds = found[f"{strategy}, state"]
            assert kind != "no error"
            assert seconds < 30
        kind, text, seconds = found["ddp, full disk"]
        assert (kind, seconds < 30) == ("OSError", True)
        assert found["ddp, warned"][0] == "no error"
    for strategy in ("zero 2", "zero 3", "fsdp2", "ddp"):
        said = [found[f"{strategy}, state"][1] for found in case["found"]]
        assert "['callbacks']['Keeps']['data'] of class PosixPath" in said[0]
    assert "File too large" in case["found"][0]["ddp, full disk"][1]
    assert "See the error of the rank that writes" in case["found"][1]["ddp, full disk"][1]
    assert not (case["folder"] / "full.ckpt").exists()


def test_exiting_program_waits_for_its_last_checkpoint(seen):
    case = seen["saves_after_fit"]
    assert case["codes"] == [0, 0], case["err"]
    assert case["found"] == [{"in flight": True}] * 2
    verify_checkpoint(case["folder"] / "final.ckpt")
    assert list(case["folder"].glob(".fasttrain*")) == []
