"""Checkpoints written in the background are those of the moment of saving, and a failed one ends the run."""

import copy
import os
import resource
import signal
import statistics
import threading
import time

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

import lightning_fasttrain as ft
from examples.killed_training import differences
from lightning_fasttrain.checkpoint import AtomicCheckpointIO, BackgroundCheckpointIO
from lightning_fasttrain.checkpoint.atomic_checkpoints import can_write_in_background
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import Ranks


def fit(folder, *techniques, steps=4, net=TinyLM, path=None, plugins=(), **settings):
    keeper = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    module = net(dropout=0.3)
    torch.manual_seed(3)
    t = trainer([*techniques, settings.pop("keeper", keeper)], enable_checkpointing=True, plugins=list(plugins))
    t.fit(module, as_loader(lm_batches(steps)), ckpt_path=path)
    return module


def load(path):
    checkpoint = AtomicCheckpointIO().load_checkpoint(path)
    checkpoint.pop("callbacks", None)  # of ModelCheckpoint, with the path of its folder
    return checkpoint


class Slow(TorchCheckpointIO):
    """A user's plugin: waits for a gate before it writes."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        assert self.gate.wait(20)
        super().save_checkpoint(checkpoint, path)


def test_files_are_those_of_saves_that_training_waits_for(tmp_path):
    one = fit(tmp_path / "waits", ft.AtomicCheckpoints())
    two = fit(tmp_path / "background", ft.AtomicCheckpoints(background=True))
    assert largest_difference(weights(one), weights(two)) == 0
    for step in range(1, 5):
        path = tmp_path / "waits" / f"step={step}.ckpt"
        assert differences(load(path), load(tmp_path / "background" / path.name)) == []
        assert path.stat().st_size == (tmp_path / "background" / path.name).stat().st_size  # tied weights stay tied


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_resumes_bitwise_from_a_file_written_in_the_background(tmp_path):
    techniques = [ft.AtomicCheckpoints(background=True), ft.ExactResume()]
    whole = fit(tmp_path, *techniques)
    resumed = fit(tmp_path / "again", *copy.deepcopy(techniques), path=tmp_path / "step=2.ckpt")
    assert largest_difference(weights(whole), weights(resumed)) == 0


def test_training_may_change_what_is_being_saved(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before, slow = copy.deepcopy(state), Slow()
    io = BackgroundCheckpointIO(slow)
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    step()
    assert differences(before, state) != []
    slow.gate.set()
    assert differences(before, io.load_checkpoint(tmp_path / "a.ckpt")) == []


def test_the_older_file_is_removed_after_the_newer_is_written(tmp_path):
    slow = Slow()
    io = BackgroundCheckpointIO(slow)
    (tmp_path / "old.ckpt").write_bytes(b"")
    io.save_checkpoint({}, tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert os.listdir(tmp_path) == ["old.ckpt"]
    slow.gate.set()
    io.wait()
    assert os.listdir(tmp_path) == ["new.ckpt"]


@pytest.fixture
def _files_of_at_most_100_kib():
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, old)


class Growing(TinyLM):
    """Its checkpoint does not fit on the disk from step 3 on."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.register_buffer("big", torch.zeros(100_000))


@pytest.mark.usefixtures("_files_of_at_most_100_kib")
@pytest.mark.filterwarnings("ignore:the last checkpoint was not completed")  # of step 4
@pytest.mark.parametrize("steps", [3, 5], ids=["at the end", "at the next save"])
def test_a_full_disk_ends_the_run_and_keeps_the_older_file(tmp_path, steps):
    reached = []

    class Seen(Growing):
        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            reached.append(batch_idx)

    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    with pytest.raises(OSError, match=r"step=3.ckpt could not be written: .*File too large"):
        fit(tmp_path, ft.AtomicCheckpoints(background=True), net=Seen, steps=steps, keeper=keeper)
    assert max(reached) == min(steps - 1, 3)
    assert os.listdir(tmp_path) == ["step=2.ckpt"]


@pytest.mark.usefixtures("_files_of_at_most_100_kib")
def test_a_full_disk_is_a_warning_where_the_run_is_to_continue(tmp_path):
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    techniques = ft.AtomicCheckpoints(on_failed_save="warn", background=True)
    with pytest.warns(ft.FastTrainWarning, match=r"step=\d.ckpt could not be written: .*File too large") as seen:
        fit(tmp_path, techniques, net=Growing, keeper=keeper)
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    assert len([one for one in seen if "File too large" in str(one.message)]) >= 2  # of the last save too


@pytest.mark.usefixtures("_files_of_at_most_100_kib")
def test_the_error_of_a_run_is_not_replaced_by_that_of_its_last_save(tmp_path):
    class Fails(Growing):
        def on_train_batch_end(self, *args):
            if self.global_step == 4:
                raise KeyError("mine")

    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)
    with pytest.warns(ft.FastTrainWarning, match="last checkpoint was not completed"):
        with pytest.raises(KeyError, match="mine"):
            fit(tmp_path, ft.AtomicCheckpoints(background=True), net=Fails, keeper=keeper, steps=5)


@pytest.mark.filterwarnings("ignore:AtomicCheckpoints with Slow")
def test_a_users_plugin_writes_in_the_background_too(tmp_path):
    slow = Slow()
    slow.gate.set()
    t = trainer([ft.AtomicCheckpoints(background=True)], plugins=[slow])
    threads = []
    slow.save_checkpoint = lambda *args: threads.append(threading.current_thread())

    class Saves(TinyLM):
        def on_train_batch_end(self, *args):
            t.save_checkpoint(tmp_path / "a.ckpt")

    t.fit(Saves(), as_loader(lm_batches(1)))
    assert threads[0] is not threading.main_thread()
    assert t.strategy.checkpoint_io is slow


def test_strategies_that_write_in_the_background_or_themselves_are_left_alone(recwarn):
    t = trainer([], plugins=[AsyncCheckpointIO(AtomicCheckpointIO())])
    assert not can_write_in_background(t.strategy)
    assert not can_write_in_background(ft.FSDP2Strategy(async_checkpoints=True))
    assert len(recwarn) == 0
    with pytest.warns(ft.FastTrainWarning, match=r"with FSDP2Strategy: .* use FSDP2Strategy\(async_checkpoints=True\)"):
        assert not can_write_in_background(ft.FSDP2Strategy())


SAVING = """
import sys, torch
from lightning_fasttrain.checkpoint import AtomicCheckpointIO, BackgroundCheckpointIO
io, last = BackgroundCheckpointIO(AtomicCheckpointIO()), int(sys.argv[2])
for n in range(1, last + 1):
    io.save_checkpoint({"n": torch.full((500_000,), n)}, sys.argv[1])
    print(n, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_exits_waits_and_one_that_is_killed_leaves_a_whole_file(tmp_path):
    path, script = tmp_path / "last.ckpt", tmp_path / "saving.py"
    script.write_text(SAVING)
    Ranks(str(script), path, 1, log=tmp_path / "exits", count=None).wait()
    assert AtomicCheckpointIO().load_checkpoint(path)["n"].unique().tolist() == [1]
    for at in (2, 5):
        log = tmp_path / f"log{at}"
        saving = Ranks(str(script), path, 10**6, log=log, count=None)
        while saving.processes[0].is_alive() and log.read_text().count("\n") < at:
            time.sleep(0.001)
        assert saving.processes[0].is_alive()
        saving.stop()
        saved = AtomicCheckpointIO().load_checkpoint(path)["n"]
        assert saved.shape == (500_000,)
        assert len(saved.unique()) == 1


@pytest.mark.benchmark
def test_benchmark_stall_of_a_save(tmp_path, capsys):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 1024)

    def step():
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    plain = AtomicCheckpointIO()
    background = BackgroundCheckpointIO(plain)
    stalls, beside = {"waits": [], "background": []}, {"waits": [], "background": []}
    alone = statistics.median(step() for _ in range(10))
    for _ in range(3):
        for name, io in (("waits", plain), ("background", background)):
            state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
            began = time.perf_counter()
            io.save_checkpoint(state, tmp_path / f"{name}.ckpt")
            stalls[name].append(time.perf_counter() - began)
            beside[name].append(sum(step() for _ in range(10)))
            background.wait()
    size = (tmp_path / "waits.ckpt").stat().st_size / 2**20
    assert plain.load_checkpoint(tmp_path / "background.ckpt")["state_dict"].keys() == model.state_dict().keys()
    with capsys.disabled():
        print(f"\na checkpoint of {size:.0f} MiB, a step of {1e3 * alone:.0f} ms, medians of 3 saves in turn:")
        for name in stalls:
            stall, after = statistics.median(stalls[name]), statistics.median(beside[name])
            print(f"  {name}: training stalls for {1e3 * stall:.0f} ms, the next 10 steps take {1e3 * after:.0f} ms")
