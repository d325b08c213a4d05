"""One of two ranks has a full disk, or cannot save its state: both raise, and both can continue. Real processes."""

import pytest

from lightning_fasttrain.checkpoint.checkpoint_folder import verify_checkpoint
from tests.strategy.failing_ranks import run_scenarios


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_scenarios(tmp_path_factory.mktemp("failing"))


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
