"""Checkpoints in object storage: complete or not there, whatever interrupts an upload; read from a verified copy."""

import os
import threading
import uuid

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint import AtomicCheckpointIO
from lightning_fasttrain.checkpoint.checkpoint_folder import MANIFEST
from lightning_fasttrain.checkpoint.remote_checkpoint import fetched, newest_remote_checkpoint, remote_folder
from lightning_fasttrain.core.safe_load import CorruptCheckpoint
from lightning_fasttrain.strategy import save_sharded
from tests.checkpoint.test_checkpoint_folder import RankOfThreads, Ranks
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer


@pytest.fixture
def url():
    return f"memory://bucket-{uuid.uuid4().hex}"


@pytest.fixture
def failing(monkeypatch):
    """Make uploads of the storage fail from the n-th on: ``failing(n)``, with an error."""

    def fail_from(first, error):
        count = 0
        put = MemoryFileSystem.put_file

        def put_file(self, *args, **kwargs):
            nonlocal count
            count += 1
            if count >= first:
                raise error
            return put(self, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
        return lambda: monkeypatch.setattr(MemoryFileSystem, "put_file", put)

    return fail_from


def names(url):
    fs, path = fsspec.core.url_to_fs(url)
    return sorted(name.removeprefix(f"{path}/") for name in fs.find(path))


def save(url, texts, step=1):
    """Save as many ranks as there are texts; return what each raised."""
    ranks, raised = Ranks(len(texts)), [None] * len(texts)

    def run(rank):
        try:
            with remote_folder(url, ranks=RankOfThreads(ranks, rank), about={"step": step}) as folder:
                (folder / f"part-{rank}").write_text(texts[rank])
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


def read(url):
    with fetched(url) as folder:
        return {path.name: path.read_text() for path in sorted(folder.glob("part-*"))}


def test_the_files_of_all_ranks_come_back(url):
    assert save(f"{url}/a.ckpt", ["zero", "one", "two"]) == [None] * 3
    assert read(f"{url}/a.ckpt") == {"part-0": "zero", "part-1": "one", "part-2": "two"}


def test_a_new_save_replaces_the_old_one_and_leaves_nothing_of_it(url):
    save(f"{url}/a.ckpt", ["old", "old"])
    save(f"{url}/a.ckpt", ["new"])
    assert read(f"{url}/a.ckpt") == {"part-0": "new"}
    assert len(names(url)) == 2  # the manifest and one file


@pytest.mark.parametrize("at", range(1, 4))  # two files, and the manifest
def test_an_interrupted_upload_leaves_the_older_checkpoint(url, failing, at):
    save(f"{url}/a.ckpt", ["old", "old"])
    restore = failing(at, ConnectionResetError("the connection was reset"))
    raised = save(f"{url}/a.ckpt", ["new", "new"])
    assert all(isinstance(error, OSError) for error in raised)
    told = [str(error) for error in raised if "connection was reset" in str(error)]
    assert told
    assert "Check the credentials of this process, the address and the network" in told[0]
    assert read(f"{url}/a.ckpt") == {"part-0": "old", "part-1": "old"}
    restore()
    save(f"{url}/a.ckpt", ["new", "new"])
    assert read(f"{url}/a.ckpt") == {"part-0": "new", "part-1": "new"}
    assert len(names(url)) == 3


def test_an_upload_that_was_killed_is_not_a_checkpoint(url, failing):
    save(f"{url}/older.ckpt", ["whole"])
    failing(2, KeyboardInterrupt())
    (error,) = save(f"{url}/newer.ckpt", ["half"])
    assert isinstance(error, KeyboardInterrupt)
    with fsspec.open(f"{url}/newer.ckpt/data-0123456789abcdef/part-0", "w") as file:
        file.write("what a killed process cannot remove")
    with pytest.raises(CorruptCheckpoint, match="no MANIFEST.json, which is written last: its upload was interrupted"):
        read(f"{url}/newer.ckpt")
    assert newest_remote_checkpoint(url) == f"{url}/older.ckpt"


def test_changed_bytes_are_found_and_an_older_checkpoint_is_taken(url):
    save(f"{url}/older.ckpt", ["whole"])
    save(f"{url}/newer.ckpt", ["whole"])
    (part,) = [name for name in names(url) if "newer" in name and "part" in name]
    with fsspec.open(f"{url}/{part}", "w") as file:
        file.write("other")
    with pytest.raises(CorruptCheckpoint, match="part-0 was changed"):
        read(f"{url}/newer.ckpt")
    with pytest.warns(UserWarning, match="passed over: .*newer.ckpt is corrupt"):
        assert newest_remote_checkpoint(url) == f"{url}/older.ckpt"


@pytest.mark.parametrize("name", ["../../escaped", "data-0123456789abcdef/../../escaped", "/escaped", "other/part-0"])
def test_a_manifest_cannot_name_files_outside_of_its_folder(url, name):
    save(f"{url}/a.ckpt", ["whole"])
    with fsspec.open(f"{url}/a.ckpt/{MANIFEST}", "w") as file:
        file.write(f'{{"files": {{"{name}": {{"bytes": 1, "sha256": ""}}}}}}')
    with pytest.raises(CorruptCheckpoint, match="its MANIFEST.json names"):
        read(f"{url}/a.ckpt")


def test_wrong_credentials_give_one_sentence(url, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("An error occurred (403) when calling the ListObjectsV2 operation: Forbidden\n  at ...")

    for name in ("ls", "exists", "isdir", "put_file", "get_file", "makedirs"):
        monkeypatch.setattr(MemoryFileSystem, name, refuse)
    for act in (
        lambda: newest_remote_checkpoint(url),
        lambda: read(f"{url}/a.ckpt"),
        lambda: AtomicCheckpointIO().save_checkpoint({"step": 1}, f"{url}/a.ckpt"),
        lambda: AtomicCheckpointIO().load_checkpoint(f"{url}/a.ckpt"),
        lambda: save_sharded(f"{url}/a.ckpt", nn.Linear(2, 2).state_dict()),
    ):
        with pytest.raises(
            OSError, match="could not be (read|written): PermissionError.*Check the credentials"
        ) as told:
            act()
        assert "\n" not in str(told.value)


def test_a_sharded_checkpoint_comes_back(url, tmp_path):
    net = nn.Linear(3, 2)
    save_sharded(f"{url}/a.ckpt", net.state_dict(), rest={"step": 3})
    other = nn.Linear(3, 2)
    with fetched(f"{url}/a.ckpt") as folder:
        assert ft.strategy.load_sharded_(folder, other) == {"step": 3}
    assert torch.equal(net.weight, other.weight)


def test_a_file_is_replaced_only_by_a_complete_one(url, failing):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, f"{url}/a.ckpt")
    restore = failing(1, OSError("the network is down"))
    with pytest.raises(OSError, match="could not be written: OSError: the network is down"):
        io.save_checkpoint({"step": 2}, f"{url}/a.ckpt")
    restore()
    assert io.load_checkpoint(f"{url}/a.ckpt") == {"step": 1}
    assert names(url) == ["a.ckpt"]


def fit(url, steps, ckpt_path=None):
    """Return the weights of a run that saves every second step."""
    torch.manual_seed(0)
    net = TinyLM()
    saves = ModelCheckpoint(url, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    run = trainer([ft.ExactResume(), ft.AtomicCheckpoints(), saves], max_steps=steps, enable_checkpointing=True)
    run.fit(net, as_loader(lm_batches(6)), ckpt_path=ckpt_path)
    return list(net.parameters())


def test_a_run_resumes_from_object_storage_as_if_uninterrupted(url):
    whole = fit(f"{url}/whole", 6)
    fit(f"{url}/run", 4)
    newest = newest_remote_checkpoint(f"{url}/run")
    assert newest == f"{url}/run/step=4.ckpt"
    assert all(map(torch.equal, fit(f"{url}/run", 6, newest), whole))


def test_addresses_of_the_web_are_not_object_storage():
    for address in ("http://127.0.0.1:9/a", "zip://a::http://127.0.0.1:9/a", "simplecache::s3://a", os.sep):
        with pytest.raises(ValueError, match="expected an address in object storage"):
            newest_remote_checkpoint(address)
