"""A crash or a full disk never costs the checkpoint that was there; nothing foreign is unpickled."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fasttrain as ft
from lightning_fasttrain import AtomicCheckpointIO
from lightning_fasttrain._reading import CorruptCheckpoint
from tests.nets import TinyLM, as_loader, largest_difference, lm_batches, trainer, weights


def test_a_run_saves_and_resumes_through_it(tmp_path):
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
def test_a_full_disk_names_the_path_and_keeps_the_old_file(tmp_path):
    io, path = ft.AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(OSError, match=r"last.ckpt could not be written.*older file of this name is untouched"):
        io.save_checkpoint({"step": 2, "weights": torch.zeros(100_000)}, path)
    assert io.load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"]


class Payload:
    def __reduce__(self):
        return print, ("executed",)


def test_foreign_objects_are_refused_and_not_executed(tmp_path, capsys):
    torch.save({"state": Payload()}, tmp_path / "foreign.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        ft.AtomicCheckpointIO().load_checkpoint(tmp_path / "foreign.ckpt")
    assert "executed" not in capsys.readouterr().out


def test_a_plugin_of_ones_own_is_kept_and_said():
    class Own(ft.AtomicCheckpointIO):
        pass

    own = Own()
    t = trainer([ft.AtomicCheckpoints()], plugins=[own])
    with pytest.warns(ft.FastTrainWarning, match="AtomicCheckpoints with Own: .* which is kept"):
        t.fit(TinyLM(), as_loader(lm_batches(1)))
    assert t.strategy.checkpoint_io is own


SAVING = """
import sys, torch
from lightning_fasttrain.run.atomic_checkpoints import AtomicCheckpointIO
n = 0
while True:
    n += 1
    AtomicCheckpointIO().save_checkpoint({"n": torch.full((500_000,), n)}, sys.argv[1])
    print(n, flush=True)
"""


@pytest.mark.slow
def test_killed_while_saving_the_checkpoint_loads(tmp_path):
    path = tmp_path / "last.ckpt"
    for at in (2, 5):
        with subprocess.Popen([sys.executable, "-c", SAVING, str(path)], stdout=subprocess.PIPE, text=True) as child:
            while int(child.stdout.readline()) < at:
                pass
            child.kill()
        saved = ft.AtomicCheckpointIO().load_checkpoint(path)["n"]
        assert saved.shape == (500_000,)
        assert len(saved.unique()) == 1


def flip(path):
    """A bit of the first tensor, which torch.load does not notice."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensor = archive.read(next(name for name in archive.namelist() if name.endswith("/data/0")))
    data[data.index(tensor) + 1] ^= 1
    path.write_bytes(data)


def steps(folder, *names, run=None):
    """Checkpoints of these steps, by one plugin, which stands for one run."""
    io = AtomicCheckpointIO()
    io.run = run or io.run
    for step in names:
        io.save_checkpoint({"global_step": step, "weights": torch.zeros(10_000)}, folder / f"{step}.ckpt")
    return io.run


def test_for_a_damaged_file_an_older_one_of_the_same_run_is_loaded_if_that_is_wanted(tmp_path):
    run = steps(tmp_path, 2, 4, 6, 8)
    steps(tmp_path, 3)  # of another run
    torch.save({"global_step": 3, "state_dict": {}}, tmp_path / "foreign.ckpt")
    flip(tmp_path / "4.ckpt")
    io = AtomicCheckpointIO(substitute=True)
    with pytest.warns(UserWarning, match="4.ckpt is corrupt.*2.ckpt is loaded, an older one of the same run"):
        assert io.load_checkpoint(tmp_path / "4.ckpt")["global_step"] == 2
    assert io.run.run == run.run  # what is saved from now on is of that run
    with pytest.raises(CorruptCheckpoint, match="4.ckpt is corrupt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "4.ckpt")


def test_without_an_older_one_of_the_same_run_damage_is_an_error(tmp_path):
    steps(tmp_path, 2, 3)
    steps(tmp_path, 1)
    torch.save({"global_step": 0}, tmp_path / "foreign.ckpt")
    flip(tmp_path / "2.ckpt")
    with pytest.raises(CorruptCheckpoint, match="2.ckpt is corrupt"):
        AtomicCheckpointIO(substitute=True).load_checkpoint(tmp_path / "2.ckpt")
    (tmp_path / "only.ckpt").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="0 bytes are no archive"):
        AtomicCheckpointIO(substitute=True).load_checkpoint(tmp_path / "only.ckpt")


def test_fit_goes_on_from_an_older_one_and_validation_test_and_prediction_stop(tmp_path):
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
