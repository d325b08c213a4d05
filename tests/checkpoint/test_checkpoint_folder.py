"""A folder written by several processes is whole and checksummed, or not there; damage is noticed and passed over."""

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_fasttrain.checkpoint.checkpoint_folder import (
    _MARK,
    MANIFEST,
    checkpoint_folder,
    verify_checkpoint,
)
from lightning_fasttrain.checkpoint.newest_checkpoint import KEY, RunMark, newest_checkpoint
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.distributed import ControlGroup
from lightning_fasttrain.core.safe_load import CorruptCheckpoint


def write(target, files=None, **settings):
    with checkpoint_folder(target, **settings) as folder:
        for name, data in (files or {"a.bin": b"aaaa", "deep/b.bin": b"bb"}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return target


class Ranks:
    """What threads share, which agree and gather as processes do over a process group."""

    def __init__(self, n):
        self.barrier, self.answers = threading.Barrier(n, timeout=10), [True] * n


class RankOfThreads(ControlGroup):
    def __init__(self, shared, rank):
        super().__init__()
        self.shared, self.rank, self.count = shared, rank, len(shared.answers)

    def gather(self, mine):
        self.shared.answers[self.rank] = mine
        self.shared.barrier.wait()
        everyone = list(self.shared.answers)
        self.shared.barrier.wait()
        return everyone

    def agree(self, ok):
        return all(self.gather(ok))


def on_ranks(target, bodies):
    """Enter ``checkpoint_folder`` on as many ranks as there are ``bodies``; what each of them raised."""
    ranks, raised = Ranks(len(bodies)), [None] * len(bodies)

    def run(rank, body):
        try:
            with checkpoint_folder(target, ranks=RankOfThreads(ranks, rank)) as folder:
                body(folder)
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


def test_a_folder_has_its_manifest_and_nothing_else_is_left(tmp_path):
    write(tmp_path / "one", about={"step": 7})
    assert os.listdir(tmp_path) == ["one"]
    assert sorted(os.listdir(tmp_path / "one")) == [MANIFEST, "a.bin", "deep"]
    manifest = verify_checkpoint(tmp_path / "one")
    assert manifest["about"] == {"step": 7}
    # sha256("aaaa"), as the sha256sum command prints it
    assert manifest["files"]["a.bin"]["sha256"] == "61be55a8e2f6b4e172338bddf184d6dbee29c98853e0a0485ecee7f27b9af0b4"


def test_a_folder_replaces_the_one_of_its_name_whole(tmp_path):
    write(tmp_path / "one", {"rank0": b"x", "rank1": b"y"})
    write(tmp_path / "one", {"rank0": b"z"})
    assert list(verify_checkpoint(tmp_path / "one")["files"]) == ["rank0"]
    assert os.listdir(tmp_path) == ["one"]


def test_ranks_write_one_folder_and_share_the_hashing(tmp_path):
    bodies = [lambda folder, rank=rank: (folder / f"rank{rank}").write_bytes(bytes([rank])) for rank in range(3)]
    assert on_ranks(tmp_path / "one", bodies) == [None] * 3
    manifest = verify_checkpoint(tmp_path / "one")
    assert sorted(manifest["files"]) == ["rank0", "rank1", "rank2"]
    assert manifest["world_size"] == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_fails_is_an_error_on_all_and_the_old_folder_stays(tmp_path, failing):
    write(tmp_path / "one", {"old": b"old"})

    def full(folder):
        raise OSError(28, "No space left on device")

    bodies = [full if rank == failing else lambda folder: (folder / "new").write_bytes(b"new") for rank in (0, 1)]
    raised = on_ranks(tmp_path / "one", bodies)
    assert "No space left" in str(raised[failing])
    assert re.search(r"writing checkpoint .*/one \(.* GiB are free there\)", raised[failing].__notes__[0])
    assert "another rank failed" in str(raised[1 - failing])
    assert list(verify_checkpoint(tmp_path / "one")["files"]) == ["old"]
    assert os.listdir(tmp_path) == ["one"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "was changed": lambda one: flip(one / "a.bin"),
    "has 2 bytes of 4": lambda one: (one / "a.bin").write_bytes(b"aa"),
    "a.bin is missing": lambda one: (one / "a.bin").unlink(),
    "stale.bin does not belong": lambda one: (one / "stale.bin").write_bytes(b""),
    "no MANIFEST.json": lambda one: (one / MANIFEST).unlink(),
    "cannot be read": lambda one: (one / MANIFEST).write_text("<html>"),
    "it is a link": lambda one: (one / "deep" / "out").symlink_to("/etc/hostname"),
    "lists no files": lambda one: (one / MANIFEST).write_text('{"files": {}}'),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damage_is_noticed_and_the_one_before_is_taken(tmp_path, reason):
    first, second = write(tmp_path / "one"), write(tmp_path / "two")
    os.utime(first / MANIFEST, ns=(1, 1))
    assert newest_checkpoint(tmp_path) == second
    DAMAGES[reason](second)
    with pytest.raises(CorruptCheckpoint, match=reason):
        verify_checkpoint(second)
    if reason == "no MANIFEST.json":  # then it is no checkpoint of ours
        assert newest_checkpoint(tmp_path) == first
    else:
        with pytest.warns(UserWarning, match=reason):
            assert newest_checkpoint(tmp_path) == first


def test_temporary_names_are_no_checkpoints(tmp_path):
    whole = write(tmp_path / "whole")
    for name in (".tmp-step.ckpt", ".whole.ckpt", "whole.tmp"):
        shutil.copytree(whole, tmp_path / name)
        os.utime(tmp_path / name / MANIFEST)
    os.utime(whole / MANIFEST, ns=(1, 1))
    assert newest_checkpoint(tmp_path) == whole


def test_a_flipped_bit_in_a_file_is_noticed_though_torch_loads_it(tmp_path):
    path = tmp_path / "one.ckpt"
    torch.save({"weights": torch.ones(10_000)}, path)
    assert verify_checkpoint(path)["bytes"] == path.stat().st_size
    flip(path)
    assert not torch.equal(torch.load(path, weights_only=True)["weights"], torch.ones(10_000))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        verify_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"<html>502</html>", bytes(1000)])
def test_what_is_no_checkpoint_is_said_in_one_way(tmp_path, content):
    path = tmp_path / "one.ckpt"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=f"{len(content)} bytes are not an archive"):
        newest_checkpoint(tmp_path) if len(content) == 1 else verify_checkpoint(path)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CorruptCheckpoint, match="all of them"):
        newest_checkpoint(tmp_path)


def test_nothing_there_is_said_and_a_missing_path_is_an_error(tmp_path, caplog):
    with caplog.at_level("INFO", "lightning_fasttrain"):
        assert newest_checkpoint(tmp_path / "none") is None
    assert "starts from the beginning" in caplog.text
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        verify_checkpoint(tmp_path / "none")


def test_a_manifest_cannot_lead_out_of_the_folder(tmp_path):
    one = write(tmp_path / "one")
    manifest = json.loads((one / MANIFEST).read_text())
    manifest["files"]["../../etc/passwd"] = manifest["files"].pop("a.bin")
    (one / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpoint, match="passwd is missing"):  # never opened: it is not in the folder
        verify_checkpoint(one)


def save_and_be_killed(target, moment):
    """In a process of its own: save, and die at the ``moment``-th call that changes the disk. Its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for owner, name in [(Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (os, "replace"), (os, "fsync"),
                        (shutil, "rmtree")]:  # fmt: skip
        setattr(owner, name, counted(getattr(owner, name)))
    write(target, {"new": b"new"})
    os._exit(0)


def test_killed_at_every_moment_of_a_save_the_old_one_or_the_new_one_is_there(tmp_path):
    found, moment = [], 0
    while not found or found[-1][0] == -signal.SIGKILL:
        moment += 1
        folder = tmp_path / str(moment)
        write(folder / "one.ckpt", {"old": b"old"})
        status = save_and_be_killed(folder / "one.ckpt", moment)
        newest = newest_checkpoint(folder)
        assert newest == folder / "one.ckpt"
        assert os.listdir(folder) == ["one.ckpt"]
        found.append((status, list(verify_checkpoint(newest)["files"])))
    assert found[-1] == (0, ["new"])
    assert [files for _, files in found[:-1]].count(["old"]) > 3
    assert [files for _, files in found[:-1]].count(["new"]) > 2  # complete, and finished by the reader


def test_a_save_under_way_is_left_alone_and_a_dead_one_is_swept(tmp_path):
    write(tmp_path / "zero")
    child = os.fork()
    if not child:
        with checkpoint_folder(tmp_path / "one") as folder:
            (folder / "new").write_bytes(b"new")
            time.sleep(60)
    while not (tmp_path / ".fasttrain-tmp-one" / "new").exists():
        time.sleep(0.01)
    assert newest_checkpoint(tmp_path) == tmp_path / "zero"
    assert ".fasttrain-tmp-one" in os.listdir(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert newest_checkpoint(tmp_path) == tmp_path / "zero"
    assert os.listdir(tmp_path) == ["zero"]


def test_the_temporary_file_of_a_dead_writer_is_swept_and_that_of_a_living_one_is_not(tmp_path):
    (tmp_path / ".fasttrain-tmp-a.ckpt-1-0123abcd").write_bytes(b"left by a killed process")

    def slow(file):
        file.write(b"x")
        newest_checkpoint(tmp_path)
        time.sleep(0.01)

    write_atomic(tmp_path / "b.bin", slow)
    assert os.listdir(tmp_path) == ["b.bin"]


def test_what_others_have_named_alike_is_left_alone(tmp_path):
    write(tmp_path / "data")
    for theirs in (".tmp-data", ".old-data", ".tmp-download", "notes"):
        (tmp_path / theirs).mkdir()
        (tmp_path / theirs / "precious").write_text("theirs")
    (tmp_path / ".fasttrain-tmp-left").mkdir()  # so that there is something to sweep
    newest_checkpoint(tmp_path)
    write(tmp_path / "data")
    assert sorted(os.listdir(tmp_path)) == [".old-data", ".tmp-data", ".tmp-download", "data", "notes"]


def test_wherever_a_bit_flips_the_file_is_whole_or_corrupt_and_never_another_error(tmp_path):
    path = tmp_path / "one.ckpt"
    torch.save({"step": 3, "weights": torch.arange(300.0)}, path)
    whole, expected, unnoticed = path.read_bytes(), torch.arange(300.0), 0
    for at in range(0, len(whole), 3):
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        path.write_bytes(bytes(broken))
        try:
            verify_checkpoint(path)
        except CorruptCheckpoint:
            continue
        unnoticed += 1  # in padding, dates and the like: then it must not matter
        loaded = torch.load(path, weights_only=True)
        assert loaded["step"] == 3
        assert torch.equal(loaded["weights"], expected)
    assert unnoticed < len(whole) / 3


def told(path, step, **more):
    """A file of a run as Lightning's own plugin would write it, or ours."""
    torch.save({"global_step": step, "state_dict": {"w": torch.ones(3)}, **more}, path)
    return path


def test_newest_is_the_one_with_the_most_steps_whatever_was_copied_last(tmp_path):
    for name, step in (("b.ckpt", 30), ("a.ckpt", 7), ("c.ckpt", 12)):
        told(tmp_path / name, step)
    write(tmp_path / "folder", about={"step": 29})
    assert newest_checkpoint(tmp_path) == tmp_path / "b.ckpt"
    (tmp_path / "b.ckpt").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "folder"


def test_a_run_that_began_later_is_newer_though_it_has_fewer_steps(tmp_path):
    first, second = RunMark(), RunMark()
    told(tmp_path / "first.ckpt", 1000, **{KEY: first.facts(1000)})
    write(tmp_path / "second", about={**second.facts(5)})
    told(tmp_path / "second.ckpt", 4, **{KEY: second.facts(4)})
    told(tmp_path / "first-again.ckpt", 900, **{KEY: {**first.facts(900), "saved_at": 1.0}})
    assert newest_checkpoint(tmp_path) == tmp_path / "second"


def test_what_does_not_tell_its_step_counts_as_far_as_those_before_it(tmp_path):
    told(tmp_path / "one.ckpt", 10)
    told(tmp_path / "two.ckpt", 20)
    torch.save({"global_step": 15, "data": Path("somewhere")}, tmp_path / "own-classes.ckpt")
    for at, name in enumerate(("one.ckpt", "own-classes.ckpt", "two.ckpt")):
        os.utime(tmp_path / name, (at, at))
    assert newest_checkpoint(tmp_path) == tmp_path / "two.ckpt"
    (tmp_path / "two.ckpt").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "own-classes.ckpt"


def listing(folder):
    """Names, links and contents of all that is there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder"
    return found


def foreign(folder):
    """Things of others, under names that ours have."""
    for name in (".fasttrain-tmp-step.ckpt", ".fasttrain-tmp-notes", ".fasttrain-old-data"):
        (folder / name).mkdir()
        (folder / name / "thesis.txt").write_text("years of work")
    (folder / ".fasttrain-tmp-step.ckpt" / MANIFEST).write_text('{"version": 1, "files": {}}')
    (folder / ".fasttrain-tmp-x").symlink_to(folder / ".fasttrain-tmp-notes")
    (folder / ".fasttrain-old-y").symlink_to(folder / ".fasttrain-tmp-notes")
    (folder / ".fasttrain-tmp-dangling").symlink_to(folder / "nowhere")
    (folder / "dangling.ckpt").symlink_to(folder / "nowhere")
    (folder / ".fasttrain-tmp-todo.txt").write_text("mine")


def test_what_others_made_stays_as_it_is_even_under_our_names(tmp_path):
    foreign(tmp_path)
    told(tmp_path / "step.ckpt", 3)
    before = listing(tmp_path)
    (tmp_path / ".fasttrain-tmp-ours.ckpt-7-0123abcd").write_bytes(b"left")  # so that there is something to sweep
    assert newest_checkpoint(tmp_path) == tmp_path / "step.ckpt"
    assert listing(tmp_path) == before
    with pytest.raises(FileExistsError, match="was not made by it. Move it elsewhere"):
        write(tmp_path / "step.ckpt")
    assert listing(tmp_path) == before


def test_a_folder_without_our_mark_never_replaces_a_checkpoint(tmp_path):
    told(tmp_path / "step.ckpt", 3)
    write(tmp_path / "other", {"other": b"other"})
    (tmp_path / "other").rename(tmp_path / ".fasttrain-tmp-step.ckpt")
    before = listing(tmp_path)
    assert newest_checkpoint(tmp_path) == tmp_path / "step.ckpt"
    assert listing(tmp_path) == before


def test_a_half_save_never_takes_the_place_of_a_whole_one(tmp_path):
    write(tmp_path / "one", {"good": b"good"})
    write(tmp_path / "two", {"bad": b"bad"})
    (tmp_path / "two" / ".writing").write_bytes(_MARK)
    (tmp_path / "two" / "bad").write_bytes(b"BAD")
    (tmp_path / "two").rename(tmp_path / ".fasttrain-tmp-one")
    assert newest_checkpoint(tmp_path) == tmp_path / "one"
    assert listing(tmp_path / "one")["good"] == b"good"
    assert os.listdir(tmp_path) == ["one"]


def test_a_folder_that_is_no_checkpoint_is_not_saved_over(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("theirs")
    with pytest.raises(FileExistsError, match="not a checkpoint: it holds .'precious'"):
        write(tmp_path / "data")
    assert listing(tmp_path) == {"data": "folder", "data/precious": b"theirs"}


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/a.ckpt", "https://x/a", "s3://b/a.ckpt", "memory://a.ckpt", ""]
)
def test_addresses_are_refused_before_anything_is_fetched(address):
    for read in (newest_checkpoint, verify_checkpoint):
        with pytest.raises(ValueError, match="it is an address|an empty string"):
            read(address)
