"""A crash or a full disk never destroys an existing checkpoint; foreign objects are never unpickled."""

import collections
import datetime
import os
import pickle
import resource
import signal
import time
import zipfile
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint import AtomicCheckpointIO
from lightning_fasttrain.checkpoint.atomic_checkpoints import checkpoint_bytes
from lightning_fasttrain.core.safe_load import CorruptCheckpoint
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import Ranks


def test_a_run_saves_and_resumes_with_atomic_checkpoints(tmp_path):
    keeper = ModelCheckpoint(dirpath=tmp_path, filename="best")
    t = trainer([ft.AtomicCheckpoints(), keeper], enable_checkpointing=True)
    module = TinyLM()
    t.fit(module, as_loader(lm_batches(2)))
    assert os.listdir(tmp_path) == ["best.ckpt"]
    resumed = TinyLM()
    trainer([ft.AtomicCheckpoints()]).fit(resumed, as_loader(lm_batches(2)), ckpt_path=tmp_path / "best.ckpt")
    assert largest_difference(weights(module), weights(resumed)) == 0


@pytest.fixture
def _files_of_at_most_100_kib():
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.usefixtures("_files_of_at_most_100_kib")
def test_a_full_disk_error_names_the_path_and_keeps_the_old_file(tmp_path):
    io, path = ft.checkpoint.AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(OSError, match=r"last.ckpt could not be written.*older file of this name is unchanged"):
        io.save_checkpoint({"step": 2, "weights": torch.zeros(100_000)}, path)
    assert io.load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"]


class Payload:
    def __reduce__(self):
        return print, ("executed",)


def test_foreign_objects_are_refused_and_not_executed(tmp_path, capsys):
    torch.save({"state": Payload()}, tmp_path / "foreign.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        ft.checkpoint.AtomicCheckpointIO().load_checkpoint(tmp_path / "foreign.ckpt")
    assert "executed" not in capsys.readouterr().out


def test_a_users_checkpoint_plugin_is_kept_with_a_warning():
    class Own(ft.checkpoint.AtomicCheckpointIO):
        pass

    own = Own()
    t = trainer([ft.AtomicCheckpoints()], plugins=[own])
    with pytest.warns(ft.FastTrainWarning, match="AtomicCheckpoints with Own: .* which is kept"):
        t.fit(TinyLM(), as_loader(lm_batches(1)))
    assert t.strategy.checkpoint_io is own


SAVING = """
import sys, torch
from lightning_fasttrain.checkpoint.atomic_checkpoints import AtomicCheckpointIO
n = 0
while True:
    n += 1
    AtomicCheckpointIO().save_checkpoint({"n": torch.full((500_000,), n)}, sys.argv[1])
    print(n, flush=True)
"""


@pytest.mark.slow
def test_a_checkpoint_loads_after_a_kill_during_a_save(tmp_path):
    path = tmp_path / "last.ckpt"
    script = tmp_path / "saving.py"
    script.write_text(SAVING)
    for at in (2, 5):
        log = tmp_path / f"log{at}"
        saving = Ranks(str(script), path, log=log, count=None)
        while saving.processes[0].is_alive() and log.read_text().count("\n") < at:
            time.sleep(0.001)
        assert saving.processes[0].is_alive()
        saving.stop()
        saved = ft.checkpoint.AtomicCheckpointIO().load_checkpoint(path)["n"]
        assert saved.shape == (500_000,)
        assert len(saved.unique()) == 1


def flip(path):
    """Flip a bit of the first tensor, which torch.load does not notice."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensor = archive.read(next(name for name in archive.namelist() if name.endswith("/data/0")))
    data[data.index(tensor) + 1] ^= 1
    path.write_bytes(data)


def steps(folder, *names, run=None):
    """Save checkpoints of these steps with one plugin, which represents one run."""
    io = AtomicCheckpointIO()
    io.run = run or io.run
    for step in names:
        io.save_checkpoint({"global_step": step, "weights": torch.zeros(10_000)}, folder / f"{step}.ckpt")
    return io.run


def test_a_damaged_file_is_replaced_by_an_older_one_of_the_same_run_on_request(tmp_path):
    run = steps(tmp_path, 2, 4, 6, 8)
    steps(tmp_path, 3)  # of another run
    torch.save({"global_step": 3, "state_dict": {}}, tmp_path / "foreign.ckpt")
    flip(tmp_path / "4.ckpt")
    io = AtomicCheckpointIO(substitute=True)
    with pytest.warns(UserWarning, match="4.ckpt is corrupt.*2.ckpt is loaded, an older one of the same run"):
        assert io.load_checkpoint(tmp_path / "4.ckpt")["global_step"] == 2
    assert io.run.run == run.run  # later saves belong to that run
    with pytest.raises(CorruptCheckpoint, match="4.ckpt is corrupt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "4.ckpt")


def test_a_damaged_file_without_an_older_one_of_the_same_run_is_an_error(tmp_path):
    steps(tmp_path, 2, 3)
    steps(tmp_path, 1)
    torch.save({"global_step": 0}, tmp_path / "foreign.ckpt")
    flip(tmp_path / "2.ckpt")
    with pytest.raises(CorruptCheckpoint, match="2.ckpt is corrupt"):
        AtomicCheckpointIO(substitute=True).load_checkpoint(tmp_path / "2.ckpt")
    (tmp_path / "only.ckpt").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="0 bytes are not an archive"):
        AtomicCheckpointIO(substitute=True).load_checkpoint(tmp_path / "only.ckpt")


def test_fit_resumes_from_an_older_file_and_other_entry_points_raise(tmp_path):
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer([ft.AtomicCheckpoints(), keeper], enable_checkpointing=True).fit(TinyLM(), as_loader(lm_batches(6)))
    flip(tmp_path / "step=4.ckpt")
    t = trainer([ft.AtomicCheckpoints()], max_steps=3)
    with pytest.warns(UserWarning, match=r"step=2.ckpt is loaded, an older one of the same run"):
        t.fit(TinyLM(), as_loader(lm_batches(6)), ckpt_path=tmp_path / "step=4.ckpt")
    assert t.global_step == 3

    class Tested(TinyLM):
        test_step = TinyLM.validation_step

    for ask in (t.validate, t.test, t.predict):
        with pytest.raises(CorruptCheckpoint, match="step=4.ckpt is corrupt"):
            ask(Tested(), as_loader(lm_batches(1)), ckpt_path=tmp_path / "step=4.ckpt")


class Keeps(L.Callback):
    """Holds a given value in its state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"best": [self.value]}


UNREADABLE = [np.float32(0.5), np.zeros(2), Path("data"), datetime.datetime(2020, 1, 1), torch.optim.SGD]


@pytest.mark.parametrize("value", [*UNREADABLE, {1, Path("x")}], ids=lambda value: type(value).__name__)
def test_an_unloadable_object_is_refused_by_name_and_the_older_file_is_kept(value, tmp_path):
    keeper, path = Keeps(0), tmp_path / "last.ckpt"
    t = trainer([keeper], plugins=[AtomicCheckpointIO()])
    t.fit(TinyLM(), as_loader(lm_batches(1)))
    t.save_checkpoint(path)
    keeper.value = value
    with pytest.raises(ValueError, match="entry .'callbacks'..'Keeps'..'best'..0..* of class .* Keep numbers, strings"):
        t.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["callbacks"]["Keeps"] == {"best": [0]}
    with pytest.raises(ValueError, match="entry .'rest'..'callbacks'..0..* of class .*: it is of a class that could"):
        ft.strategy.save_sharded(tmp_path / "shards", {}, rest={"callbacks": [value]})
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_objects_that_torch_can_load_are_saved(tmp_path):
    values = {"a": [None, True, 1, 2.5, 1j, "x", b"y", bytearray(b"z")], (1, 2): torch.ones(2), "s": {3}}
    values["types"] = [torch.float32, torch.device("cpu"), torch.Size([2]), collections.Counter("ab")]
    AtomicCheckpointIO().save_checkpoint(values, tmp_path / "a.ckpt")
    again = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert repr(again) == repr(values)


def test_an_unwritable_folder_is_reported_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    module = TinyLM()
    before = weights(module)
    keeper = ModelCheckpoint(tmp_path / "file" / "checkpoints")
    with pytest.raises(OSError, match=r"cannot be written to .*/file/checkpoints: Not a directory .* another dirpath"):
        trainer([ft.AtomicCheckpoints(), keeper], enable_checkpointing=True).fit(module, as_loader(lm_batches(2)))
    assert largest_difference(before, weights(module)) == 0


class Vast(TinyLM):
    """Has a terabyte in a sparse file, which is never read."""

    def __init__(self, path):
        super().__init__()
        self.register_buffer("vast", torch.from_file(str(path), shared=True, size=2**40, dtype=torch.uint8))


def test_too_little_disk_space_for_two_checkpoints_is_reported_before_the_run(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1000, save_on_train_epoch_end=False)
    techniques = [ft.AtomicCheckpoints(), keeper]
    with pytest.raises(OSError, match=r"has \d+\.\d\d GiB free, .* are missing: a checkpoint takes about 1024.00 GiB"):
        trainer(techniques, enable_checkpointing=True).fit(Vast(tmp_path / "sparse"), as_loader(lm_batches(1)))
    t = trainer([ft.AtomicCheckpoints(on_failed_save="warn"), keeper], enable_checkpointing=True)
    with pytest.warns(ft.FastTrainWarning, match="takes about 1024.00 GiB"):
        t.fit(Vast(tmp_path / "sparse"), as_loader(lm_batches(1)))


def test_checkpoint_size_includes_future_optimizer_state():
    module = TinyLM(optimizer=torch.optim.AdamW)
    t = trainer([])
    t.fit(module, as_loader(lm_batches(1)))
    once = sum(p.numel() * 4 for p in module.parameters())
    assert checkpoint_bytes(t, t.optimizers) == 3 * once
    assert checkpoint_bytes(t, []) == once


@pytest.mark.usefixtures("_files_of_at_most_100_kib")
def test_a_failed_save_reports_the_disk_error_and_stops_or_warns(tmp_path):
    class Big(TinyLM):
        def __init__(self):
            super().__init__()
            self.register_buffer("big", torch.zeros(100_000))

    def fit(**settings):
        keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
        t = trainer([ft.AtomicCheckpoints(**settings), keeper], enable_checkpointing=True)
        t.fit(Big(), as_loader(lm_batches(4)))
        return t

    with pytest.raises(OSError, match=r"could not be written: .*File too large; \d+\.\d\d GiB are free,.* Free some"):
        fit()
    with pytest.warns(ft.FastTrainWarning, match="File too large.*Training continues without this checkpoint"):
        assert fit(on_failed_save="warn").global_step == 4
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:AtomicCheckpoints with FailsOnce")
def test_older_checkpoints_are_kept_while_saves_fail(tmp_path):
    class FailsOnce(AtomicCheckpointIO):
        saves = 0

        def save_checkpoint(self, *args, **kwargs):
            self.saves += 1
            if self.saves == 2:
                raise OSError("full")
            super().save_checkpoint(*args, **kwargs)

    def train(batches):
        keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
        techniques = [ft.AtomicCheckpoints(on_failed_save="warn"), keeper]
        trainer(techniques, enable_checkpointing=True, plugins=[FailsOnce()]).fit(TinyLM(), as_loader(batches))

    with pytest.warns(ft.FastTrainWarning, match="full Training continues without"):
        train(lm_batches(2))
    assert os.listdir(tmp_path) == ["step=1.ckpt"]


def test_only_leftovers_of_killed_saves_are_removed_when_a_run_begins(tmp_path):
    (tmp_path / ".fasttrain-tmp-last.ckpt-7-0123abcd").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    keeper = ModelCheckpoint(tmp_path, "best")
    trainer([ft.AtomicCheckpoints(), keeper], enable_checkpointing=True).fit(TinyLM(), as_loader(lm_batches(1)))
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "notes.txt"]
