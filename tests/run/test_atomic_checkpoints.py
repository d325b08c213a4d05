"""A crash or a full disk never costs the checkpoint that was there; nothing foreign is unpickled."""

import os
import pickle
import resource
import signal
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fasttrain as ft
from lightning_fasttrain import AtomicCheckpointIO
from lightning_fasttrain._checkpoint_folder import CorruptCheckpoint
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


def test_in_the_place_of_a_damaged_file_the_newest_whole_one_is_loaded(tmp_path):
    io = AtomicCheckpointIO()
    for step in (1, 2, 3):
        io.save_checkpoint({"step": step, "weights": torch.zeros(10_000)}, tmp_path / f"{step}.ckpt")
        os.utime(tmp_path / f"{step}.ckpt", ns=(step, step))
    broken = bytearray((tmp_path / "3.ckpt").read_bytes())
    broken[len(broken) // 2] ^= 1
    (tmp_path / "3.ckpt").write_bytes(broken)
    with pytest.warns(UserWarning, match="3.ckpt is corrupt") as said:
        assert io.load_checkpoint(tmp_path / "3.ckpt")["step"] == 2
    assert any("2.ckpt is loaded" in str(w.message) for w in said)


def test_a_damaged_file_alone_is_an_error_of_its_own(tmp_path):
    (tmp_path / "only.ckpt").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="0 bytes are no archive"), pytest.warns(UserWarning, match="passed"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "only.ckpt")
