"""Checkpoints on a real S3 server: complete or not there, also where the connection, the server or the run dies."""

import signal
import uuid

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint import AtomicCheckpointIO
from lightning_fasttrain.checkpoint.remote_checkpoint import newest_remote_checkpoint
from tests.checkpoint.test_remote_checkpoint import fit, names, read, save
from tests.support.ranks import Ranks
from tests.support.s3_server import BUCKET, forget_connections, s3_server

KILLED = """
import os, signal, sys
from lightning_fasttrain.checkpoint.remote_checkpoint import remote_folder
from lightning_fasttrain.core.distributed import ControlGroup

class Killed(ControlGroup):
    def gather(self, mine):  # its files are uploaded, and the manifest is not
        os.kill(os.getpid(), signal.SIGKILL)

with remote_folder(sys.argv[1], ranks=Killed(), about=None) as folder:
    (folder / "part-0").write_text("half")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def url(server):
    yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
    server.cut_at_upload(None)


def test_the_files_of_all_ranks_come_back_and_replace_older_ones(url):
    assert save(f"{url}/a.ckpt", ["old"]) == [None]
    assert save(f"{url}/a.ckpt", ["zero", "one", "two"]) == [None] * 3
    assert read(f"{url}/a.ckpt") == {"part-0": "zero", "part-1": "one", "part-2": "two"}
    assert len(names(f"{url}")) == 4
    assert newest_remote_checkpoint(url) == f"{url}/a.ckpt"


@pytest.mark.filterwarnings("ignore:.*could not be removed")  # nothing can be, without a connection
@pytest.mark.parametrize("at", [1, 2, 3])  # two files, the manifest
def test_a_cut_connection_leaves_the_older_checkpoint(server, url, at):
    save(f"{url}/step=1.ckpt", ["old", "old"])
    save(f"{url}/step=2.ckpt", ["whole"])
    server.cut_at_upload(at)
    raised = save(f"{url}/step=1.ckpt", ["new", "new"])
    assert all(isinstance(error, OSError) for error in raised)
    assert any("Check the credentials of this process, the address and the network" in str(one) for one in raised)
    assert isinstance(*save(f"{url}/step=3.ckpt", ["new"]), OSError)
    server.cut_at_upload(None)
    assert read(f"{url}/step=1.ckpt") == {"part-0": "old", "part-1": "old"}
    assert newest_remote_checkpoint(url) == f"{url}/step=2.ckpt"
    assert save(f"{url}/step=1.ckpt", ["new", "new"]) == [None, None]
    assert len(names(f"{url}/step=1.ckpt")) == 3


def test_a_killed_upload_is_not_a_checkpoint(url, tmp_path):
    save(f"{url}/a.ckpt", ["whole"])
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = Ranks(str(script), f"{url}/b.ckpt", log=tmp_path / "log", count=None)
    (code,), _, _ = killed.end(timeout_s=60)
    assert code == -signal.SIGKILL
    assert [name for name in names(f"{url}/b.ckpt") if "part-0" in name]
    assert newest_remote_checkpoint(url) == f"{url}/a.ckpt"


def test_a_server_that_dies_during_an_upload_gives_one_sentence(tmp_path):
    with s3_server(tmp_path) as server:
        url = f"s3://{BUCKET}/run/a.ckpt"
        save(url, ["old"])
        server.kill()
        (error,) = save(url, ["new"])
    assert "could not be written: " in str(error)
    assert "the address and the network." in str(error)


def acts(url):
    """Everything that reads or writes an address."""
    return (
        lambda: newest_remote_checkpoint(url),
        lambda: read(f"{url}/a.ckpt"),
        lambda: AtomicCheckpointIO().save_checkpoint({"step": 1}, f"{url}/a.ckpt"),
        lambda: AtomicCheckpointIO().load_checkpoint(f"{url}/a.ckpt"),
        lambda: ft.strategy.save_sharded(f"{url}/a.ckpt", nn.Linear(2, 2).state_dict()),
    )


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_give_one_sentence(url, wrong, monkeypatch):
    save(f"{url}/a.ckpt", ["whole"])
    monkeypatch.setenv(wrong, "AKIAWRONG")
    forget_connections()
    for act in acts(url):
        with pytest.raises(OSError, match="(read|written): PermissionError: .*[a-z]. Check the credentials") as told:
            act()
        assert "\n" not in str(told.value)
    monkeypatch.undo()
    forget_connections()
    assert read(f"{url}/a.ckpt") == {"part-0": "whole"}


def test_a_missing_bucket_is_refused_and_not_made(url):
    for _ in range(2):
        for act in acts("s3://missing/run")[1:]:
            with pytest.raises(OSError, match=r"s3://missing/run/a.ckpt.* Check (its address|the credentials)"):
                act()


def test_a_run_that_could_not_save_is_refused_before_its_first_step(url):
    with pytest.raises(OSError, match="in s3://missing/run could not be written: FileNotFoundError: The spec"):
        fit("s3://missing/run", 4)


def test_a_run_resumes_as_if_uninterrupted(url):
    whole = fit(f"{url}/whole", 6)
    fit(f"{url}/run", 4)
    newest = newest_remote_checkpoint(f"{url}/run")
    assert newest == f"{url}/run/step=4.ckpt"
    assert all(map(torch.equal, fit(f"{url}/run", 6, newest), whole))


@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set')
def test_lasts_of_lightning_are_not_found_in_a_bucket_and_ours_are(url):
    fit(f"{url}/run", 4)
    with pytest.raises(FileNotFoundError, match=r"on this machine only.*\.newest_remote_checkpoint\(address\)"):
        fit(f"{url}/run", 6, "last")
    with pytest.raises(ValueError, match=r"looks into folders of this machine. Use .*\.newest_remote_checkpoint"):
        ft.newest_checkpoint(f"{url}/run")


@pytest.mark.parametrize("name", ["with space/ünï/模型", "a+b&c=d/per%20cent/ha#sh", "qu?est", "st*r/[b]{c}"])
def test_any_name_of_a_run_is_written_found_and_resumed(url, name):
    fit(f"{url}/{name}", 4)
    newest = newest_remote_checkpoint(f"{url}/{name}")
    assert newest == f"{url}/{name}/step=4.ckpt"
    fit(f"{url}/{name}", 6, newest)
    assert newest_remote_checkpoint(f"{url}/{name}") == f"{url}/{name}/step=6.ckpt"


def test_removing_a_checkpoint_removes_nothing_that_its_name_matches(url):
    for name in ("star", "st*r"):
        fit(f"{url}/{name}", 4)
    AtomicCheckpointIO().remove_checkpoint(f"{url}/st*r/step=2.ckpt")
    assert [name for name in names(url) if "step=2" in name] == ["star/step=2.ckpt"]
    assert newest_remote_checkpoint(f"{url}/st*r") == f"{url}/st*r/step=4.ckpt"
