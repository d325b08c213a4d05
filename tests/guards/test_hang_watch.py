"""Reports, and real processes that hang, are stopped, are killed or fail: see ``guard_scenarios.py``."""

import copy
import threading
import time

import pytest

from lightning_fasttrain.guards.hang_watch import HangWatch, Position, ProgressWatch, describe
from tests.support.guard_scenarios import TIMEOUT_S, run_scenarios
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer

HERE = [
    *("hangs", "holds the lock", "stopped", "main stopped", "main killed", "validates for long"),
    *("fails, Lightning", "fails, torchrun", "alone", "suspended", "orphan"),
    "holds the lock at once",
]

ENDED = ([1], [-9])  # the main process, by itself, or by Lightning's observer when it sees that a child has ended


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_scenarios(tmp_path_factory)


def watchers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fasttrain")]


@pytest.mark.parametrize("name", HERE)
def test_no_process_is_left_running(found, name):
    assert found[name]["orphans"] == []
    assert None not in found[name]["codes"] or name == "holds the lock"  # the launcher ends it, as torchrun does


def test_the_blocking_rank_is_named_with_its_stack(found):
    seen = found["hangs"]
    assert seen["codes"] == [1, 1]
    assert seen["seconds"] < TIMEOUT_S + 15
    said = seen["err"]["0"].partition("HangWatch: no sign of life within the limit.")[2]
    assert "rank 1: step 4, next batch" in said or "rank 1: step 4, forward" in said
    assert "rank 0: step 4, backward" in said
    assert "rank 1 is the furthest behind: the others wait for it.\nrank 1 is at" in said
    assert "in sleep_for_ever" in said
    assert "in sleep_for_ever" in seen["err"]["1"]


def test_stacks_and_report_are_written_to_files_too(found):
    files = found["hangs"]["files"]
    assert "in sleep_for_ever" in files["hang/hang-rank=1.txt"]
    assert "in _engine_run_backward" in files["hang/hang-rank=0.txt"]
    assert "rank 1 is the furthest behind" in files["hang/hang-rank=0.txt"]


def test_a_rank_holding_pythons_lock_is_silent_and_faulthandler_shows_its_stack(found):
    seen = found["holds the lock"]
    assert "rank 1 is silent: stopped, ended, or holding Python's lock" in seen["err"]["0"]
    assert "in hold_the_lock" in seen["err"]["1"].partition("Timeout (")[2]
    assert seen["codes"][0] == 1


def test_a_lock_held_from_the_start_is_shown_too(found):
    seen = found["holds the lock at once"]
    assert "in hold_the_lock" in seen["err"]["main"].partition("Timeout (")[2]
    assert seen["codes"] == [0]


def test_a_stopped_child_is_named_and_killed(found):
    assert "rank 1 is silent" in found["stopped"]["err"]["main"]
    assert found["stopped"]["codes"] in ENDED
    assert "failed:" not in found["stopped"]["err"]["main"]  # errors that follow from the end are not reported


def test_a_stopped_main_process_is_named_and_killed_by_its_child(found):
    assert "rank 0, which holds it, has stopped or ended" in found["main stopped"]["err"]["main"]
    assert found["main stopped"]["codes"] == [-9]


def test_a_stopped_child_ends_with_its_killed_main_process(found):
    assert found["main killed"]["codes"] == [-9]
    assert found["main killed"]["seconds"] < TIMEOUT_S  # reported by the kernel, without a time limit


def test_the_watchdog_ends_a_rank_whose_launcher_has_ended(found):
    assert "ends because its launcher" in found["orphan"]["err"]["main"]


def test_waiting_for_a_rank_that_makes_progress_is_not_a_hang(found):
    assert found["validates for long"]["codes"] == [0, 0]
    assert found["validates for long"]["seconds"] > 1.3 * TIMEOUT_S  # longer than rank 1 may be quiet


def test_suspension_of_the_process_is_not_a_hang(found):
    assert found["suspended"]["codes"] == [0]


def test_a_hang_in_a_bare_loop_is_reported(found):
    assert found["alone"]["codes"] == [1]
    assert "rank 0: step 4, backward, quiet for 1 s" in found["alone"]["files"]["hang/hang-rank=0.txt"]


def test_a_ranks_error_is_shown_first_and_later_waits_are_limited(found):
    seen = found["fails, Lightning"]  # its OnExceptionCheckpoint waits for the other rank, which waits for this one
    error, _, report = seen["err"]["main"].partition("HangWatch: no sign of life")
    assert "rank 1 failed:\nTraceback" in error
    assert "ValueError: boom on rank 1" in error
    assert "rank 1 failed with ValueError: boom on rank 1. The others wait for it." in report
    assert seen["codes"] in ENDED
    assert seen["seconds"] < TIMEOUT_S + 15


def test_an_error_ends_the_other_rank_at_once_if_nothing_waits(found):
    seen = found["fails, torchrun"]
    assert seen["codes"] == [1]
    assert seen["seconds"] < 20
    assert "[rank1]: ValueError: boom on rank 1" in seen["err"]["main"]


EVERYONE = {1: Position(1, step=3, beats=1, phase="forward"), 2: Position(2, step=3, beats=4, phase="next batch")}


@pytest.mark.parametrize(
    ("mine", "others", "silent", "size", "said"),
    [
        (Position(0, step=3, beats=4), EVERYONE, (), 3, "rank 1 is the furthest behind"),
        (Position(0, step=2, beats=9), EVERYONE, (), 3, "rank 0 is the furthest behind"),
        (Position(0, step=3, beats=1), EVERYONE, (), 3, "ranks 0, 1 are the furthest behind"),
        (Position(0, step=3, beats=4), EVERYONE, {2}, 3, "rank 2 is silent"),
        (Position(0, step=3, beats=4, error="ValueError: x"), EVERYONE, {2}, 3, "rank 0 failed with ValueError: x"),
        (Position(0, step=3, beats=4), EVERYONE, (), 5, "ranks 3, 4 are not in the loop"),
        (Position(0, step=3, beats=1), {1: EVERYONE[1]}, (), 2, "All ranks are at the same position"),
        (Position(0), None, (), 2, "rank 0, which holds it, has stopped or ended"),
    ],
)
def test_the_blocking_ranks_are_named(mine, others, silent, size, said, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert said in describe(mine, others, silent, size)


def test_the_first_time_in_a_phase_and_checkpoints_have_a_longer_limit():
    watch = ProgressWatch(1.0, first_timeout_s=9.0)
    watch.begin_step()
    assert not watch._is_known("forward")
    watch.beat("backward")
    watch.begin_step()
    assert watch._is_known("forward")
    watch.beat("checkpoint")
    watch.beat("checkpoint")
    assert not watch._is_known("checkpoint")


def test_all_phases_of_a_run_send_signs_of_life_and_the_thread_ends_with_it(tmp_path):
    seen, technique = [], HangWatch(folder=tmp_path / "a")

    class Spy(ProgressWatch):
        def beat(self, phase):
            seen.append(phase)
            super().beat(phase)

    class Watch(TinyLM):
        def on_train_start(self):
            technique._watch.__class__ = Spy
            assert len(watchers()) == 1

    t = trainer([technique])
    t.fit(Watch(), as_loader(lm_batches(2)), as_loader(lm_batches(1)))
    assert watchers() == []
    steps = ["backward", "optimizer step", "next batch"] * 2
    assert seen == [*steps, "evaluation", "after evaluation", "end of training"]


def test_the_thread_ends_when_the_run_fails():
    class Fails(TinyLM):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trainer([HangWatch()]).fit(Fails(), as_loader(lm_batches(1)))
    assert watchers() == []


def test_a_copy_made_during_a_run_has_no_thread():
    copies = []

    class Copies(TinyLM):
        def on_train_start(self):
            copies.append(copy.deepcopy(technique))

    technique = HangWatch(7.0)
    trainer([technique]).fit(Copies(), as_loader(lm_batches(1)))
    assert [(other.timeout_s, other._watch) for other in copies] == [(7.0, None)]


def test_a_sign_of_life_is_cheap():
    with ProgressWatch() as watch:
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            watch.beat("backward")
            times.append(time.perf_counter() - start)
    assert sorted(times)[1000] < 20e-6  # about 0.3 µs; a lock or a system call would pass, a store would not


@pytest.mark.parametrize("arguments", [{"timeout_s": 0}, {"timeout_s": -1.0}, {"first_timeout_s": 0}])
def test_times_must_be_positive(arguments):
    for kind in (HangWatch, ProgressWatch):
        with pytest.raises(ValueError, match="must be greater than 0"):
            kind(**arguments)
