"""Real signals: to one process here, to two under torchrun and under Lightning's launcher in ``guard_scenarios.py``."""

import json
import multiprocessing
import signal
import subprocess
import threading
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_fasttrain import FastTrainWarning, TokenWeightedAccumulation
from lightning_fasttrain.guards import HangWatch
from lightning_fasttrain.guards.preemption import Preemption, PreemptionFlag, _let_children_exit
from lightning_fasttrain.profiling import MemoryTimeline
from tests.support.guard_scenarios import run_scenarios
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, trainer, weights

BATCHES = lm_batches(5)


class SignalAt(L.Callback):
    """Sends this process a signal during the k-th call of a hook."""

    def __init__(self, hook="on_train_batch_start", k=1, number=signal.SIGTERM):
        self.k, self.number = k, number
        setattr(self, hook, self.count)

    def count(self, *args, **kwargs):
        self.k -= 1
        if self.k == 0:
            signal.raise_signal(self.number)


class Resumable:
    """A loader with a position: without one, Lightning restarts the epoch's data."""

    def __init__(self, batches):
        self.batches, self.given = batches, 0

    def __iter__(self):
        for i in range(self.given, len(self.batches)):
            self.given = (i + 1) % len(self.batches)
            yield self.batches[i]

    def __len__(self):
        return len(self.batches)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def run(callbacks, ckpt_path=None, module=None, **settings):
    module = module or TinyLM()
    torch.manual_seed(11)
    t = trainer(
        callbacks,
        **{
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
            **settings,
        },
    )
    t.fit(module, Resumable(BATCHES), as_loader(BATCHES[:2]), ckpt_path=ckpt_path, weights_only=True)
    return module, t


def preempted(folder, *callbacks, module=None, **settings):
    with pytest.raises(SystemExit) as caught:
        run([Preemption(folder), *callbacks], module=module, **settings)
    assert caught.value.code == 143
    return sorted(path.name for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize("k", [1, 2, 5, 6, 9, 10])
@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 2}, {"limit_val_batches": 0}], ids=str)
def test_a_preempted_run_resumes_as_if_uninterrupted(tmp_path, k, settings):
    assert preempted(tmp_path, SignalAt(k=k), **settings) == [f"preempted-step={k}.ckpt"]
    whole, t = run([], **settings)
    resumed, u = run([], tmp_path / f"preempted-step={k}.ckpt", **settings)
    assert largest_difference(weights(whole), weights(resumed)) == 0
    assert (u.global_step, u.current_epoch) == (t.global_step, t.current_epoch) == (10, 2)


PLACES = {"a file": "file", "below a file": "file/folder", "not a disk's": "/proc/folder"}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("make", [Preemption, MemoryTimeline, lambda folder: HangWatch(folder=folder)])
def test_a_folder_that_cannot_be_written_to_is_an_error_before_the_first_step(tmp_path, where, make):
    (tmp_path / "file").touch()
    module = TinyLM()
    before = weights(module)
    with pytest.raises(
        OSError, match=r"no file can be created there, \w+ .*Use a folder|be written to .*use Preemption\(folder=...\)"
    ):
        run([make(tmp_path / PLACES[where])], module=module)
    assert largest_difference(before, weights(module)) == 0


@pytest.mark.parametrize("window", [{"accumulate_grad_batches": 2}, {}], ids=["Lightning's", "ours"])
def test_never_saves_inside_an_accumulation_window(tmp_path, window):
    ours = [] if window else [TokenWeightedAccumulation(2)]
    assert preempted(tmp_path, SignalAt(k=3), *ours, **window) == ["preempted-step=2.ckpt"]
    progress = torch.load(tmp_path / "preempted-step=2.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert progress["epoch_loop.batch_progress"]["total"]["completed"] == 4


def test_manual_optimization_saves_only_after_a_step(tmp_path):
    class Manual(TinyLM):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    assert preempted(tmp_path, SignalAt(k=3), module=Manual()) == ["preempted-step=2.ckpt"]


@pytest.mark.parametrize(
    ("hook", "step"), [("on_validation_batch_start", 5), ("on_save_checkpoint", 5), ("on_train_epoch_end", 6)]
)
def test_work_between_steps_is_finished_first(tmp_path, hook, step):
    seen = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(trainer.global_step)

    writer = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=5)
    assert preempted(tmp_path / "ours", SignalAt(hook), Watch(), writer) == [f"preempted-step={step}.ckpt"]
    assert seen == [5]


def test_saves_nothing_before_the_first_step(tmp_path):
    assert preempted(tmp_path, SignalAt("on_sanity_check_start"), num_sanity_val_steps=1) == []


def test_the_program_can_request_preemption(tmp_path):
    class Ask(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trainer.callbacks[0].request()

    assert preempted(tmp_path, Ask()) == ["preempted-step=1.ckpt"]


def test_a_signal_after_the_last_step_boundary_is_handled(tmp_path):
    with pytest.raises(SystemExit):
        run([SignalAt("on_train_end"), Preemption(tmp_path)])
    assert (tmp_path / "preempted-step=10.ckpt").exists()


def test_further_signals_during_the_save_are_ignored(tmp_path):
    assert preempted(tmp_path, SignalAt(k=2), SignalAt("on_save_checkpoint"), SignalAt("on_exception")) == [
        "preempted-step=2.ckpt"
    ]
    assert torch.load(tmp_path / "preempted-step=2.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("end", ["well", "preempted", "failed"])
def test_handlers_and_patches_are_restored(tmp_path, end):
    class Boom(L.Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("boom")

    mine = lambda *_: None  # noqa: E731
    callbacks = {"well": [], "preempted": [SignalAt()], "failed": [Boom()]}[end]
    before = signal.signal(signal.SIGTERM, mine)
    try:
        t = trainer([Preemption(tmp_path), *callbacks])
        with pytest.raises((SystemExit, RuntimeError)) if callbacks else pytest.MonkeyPatch.context():
            t.fit(TinyLM(), as_loader(BATCHES))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    for place in (t.fit_loop, t.fit_loop.epoch_loop, t._signal_connector):
        assert not [name for name, value in vars(place).items() if callable(value) and hasattr(type(place), name)]


def test_writes_to_the_folder_of_the_runs_checkpoints(tmp_path):
    with pytest.raises(SystemExit):
        run([Preemption(), SignalAt(), ModelCheckpoint(tmp_path / "theirs")])
    with pytest.raises(SystemExit):
        run([Preemption(), SignalAt()], default_root_dir=tmp_path)
    assert (tmp_path / "theirs" / "preempted-step=1.ckpt").exists()
    assert (tmp_path / "preempted-step=1.ckpt").exists()


def test_another_signal_and_exit_code(tmp_path):
    with pytest.raises(SystemExit) as caught:
        run([Preemption(tmp_path, [signal.SIGUSR2], exit_code=75), SignalAt(number=signal.SIGUSR2)])
    assert caught.value.code == 75


def test_in_another_thread_it_warns_and_accepts_requests():
    answers = []

    def loop():
        flag = PreemptionFlag()
        with pytest.warns(FastTrainWarning, match="SIGTERM cannot be handled in this thread: .*main thread"):
            flag.__enter__()
        answers.append(flag.should_stop())
        flag.request()
        answers.append(flag.should_stop())
        flag.__exit__(None)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert answers == [False, True]


def test_a_process_forked_from_the_run_can_be_terminated():
    with PreemptionFlag() as flag:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10)
    assert child.exitcode == -signal.SIGTERM
    assert not flag.raised


def test_a_search_for_a_learning_rate_is_not_saved(tmp_path):
    class Net(TinyLM):
        lr = 0.01

        def training_step(self, batch, batch_idx):
            technique.request()
            return super().training_step(batch, batch_idx)

    technique = Preemption(tmp_path)
    with pytest.raises(SystemExit):
        run([technique, LearningRateFinder(num_training_steps=3)], module=Net(), default_root_dir=tmp_path / "other")
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("code", [143, 1])
def test_lightnings_observer_lets_the_main_process_finish_unless_a_child_failed(code):
    child, main = subprocess.Popen(["sh", "-c", f"exit {code}"]), subprocess.Popen(["sleep", "60"])
    observer = _ChildProcessObserver(main.pid, [child], sleep_period=1)
    observer.start()
    try:
        _let_children_exit(143)
        observer.join(5)
        assert not observer.is_alive()
        time.sleep(0.2)
        assert main.poll() == (None if code == 143 else -signal.SIGKILL)
    finally:
        main.kill()
        main.wait()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"signals": ()}, ValueError, "no signal could request preemption"),
        ({"signals": signal.SIGTERM}, TypeError, "expected a list of whole numbers"),
        ({"signals": (signal.SIGKILL,)}, ValueError, "not a signal that can be caught"),
        ({"signals": (999,)}, ValueError, "999 is not a signal"),
        ({"exit_code": 300}, ValueError, "exit_code=300"),
        ({"every": 0}, ValueError, "every=0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Preemption(**arguments)


def test_slurms_requeue_signal_is_left_to_lightning(monkeypatch):
    for name, value in {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "a", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    t = trainer([Preemption(signals=(signal.SIGUSR1,))], plugins=[SLURMEnvironment(auto_requeue=True)])
    with pytest.raises(ValueError, match=r"saves and requeues the job when it receives SIGUSR1.*Remove this signal"):
        t.fit(TinyLM(), as_loader(BATCHES))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    seen = run_scenarios(tmp_path_factory)
    seen["ranks"] = json.loads(Path(seen["preempted, torchrun"]["folder"], "found0.json").read_text())
    return seen


@pytest.mark.parametrize(
    ("way", "step"), [("rank 1", 4), ("window", 2), ("both, at different steps", 4), ("end of epoch", 5)]
)
def test_a_signal_to_any_rank_stops_all_at_the_same_step(found, way, step):
    for rank in found["ranks"]:
        assert rank[way] == [143, [f"preempted-step={step}.ckpt"], True]


def test_several_ranks_end_normally_without_a_signal(found):
    assert [rank["early"] for rank in found["ranks"]] == [[0, [], True]] * 2


def test_a_bare_loop_stops_at_the_same_step_on_all_ranks(found):
    assert [rank["bare loop"] for rank in found["ranks"]] == [9, 9]  # signal at 4, exchange at 6, answer at 9


def test_preempted_torchrun_saves_one_checkpoint_and_all_ranks_exit_with_143(found):
    seen = found["preempted, torchrun"]
    assert seen["codes of ranks"] == ["143", "143"]
    assert len([path for path in seen["saved"] if path.startswith("outside")]) == 1
    assert seen["orphans"] == []


def test_a_preempted_child_of_lightning_ends_the_main_process_too(found):
    seen = found["preempted, Lightning"]  # all receive the signal again while they save
    assert seen["codes"] == [143]
    assert seen["codes of ranks"] == ["143", "143"]
    assert len(seen["saved"]) == 1
    assert seen["orphans"] == []
    assert f"Saved {seen['saved'][0]}" in seen["err"]["main"].replace(str(seen["folder"]) + "/", "")
