"""A reader sees the old file or the new one, whatever happens in between."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_fasttrain.core import atomic_write
from lightning_fasttrain.core.atomic_write import write_atomic


def test_writes_makes_folders_and_leaves_nothing_behind(tmp_path):
    target = tmp_path / "deep" / "er" / "a.json"
    assert write_atomic(target, "{}") == target
    assert write_atomic(target, b"[]").read_bytes() == b"[]"
    assert os.listdir(target.parent) == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    target = write_atomic(tmp_path / "a.json", "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_mode_of_the_old_file_is_kept_and_a_new_one_has_the_users(tmp_path):
    (tmp_path / "plain").write_text("")
    target = write_atomic(tmp_path / "a.json", "old")
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode
    target.chmod(0o600)
    assert write_atomic(target, "new").stat().st_mode & 0o777 == 0o600


KILLED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("files", sys.argv[2])  # this file alone: the package takes seconds
spec.loader.exec_module(files := importlib.util.module_from_spec(spec))
write_atomic = files.write_atomic
n = 0
while True:
    n += 1
    write_atomic(sys.argv[1], bytes([n % 256]) * 5_000_000)
    print("written", flush=True)
"""


def test_killed_at_random_moments_the_file_is_always_whole(tmp_path):
    target = tmp_path / "a.bin"
    for delay in (0.013, 0.029, 0.041, 0.067, 0.083):
        command = [sys.executable, "-c", KILLED, str(target), atomic_write.__file__]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(delay)
            child.send_signal(signal.SIGKILL)
        data = target.read_bytes()
        assert len(data) == 5_000_000
        assert len(set(data)) == 1
