"""Snapshots in the memory of peers: two real processes, one of which is killed and loses its host's memory."""

import json
import resource
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.run import PeerMemory, PeerSnapshots
from lightning_fasttrain.technique import check_together
from tests.run.peer_scenarios import RUNS
from tests.support.nets import ShallowLM, fit, largest_difference, lm_batches, weights
from tests.support.ranks import run_ranks
from tests.support.run_example import last_line


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run of the scenarios → results of both ranks."""
    folder = tmp_path_factory.mktemp("peers")
    run_ranks("tests.run.peer_scenarios", folder, log=folder / "log", count=None, timeout_s=60)
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_a_lost_rank_gets_its_state_from_its_peer_and_training_continues_bit_for_bit(found, name):
    assert [rank["began"] for rank in found[name]] == [4, 4]
    assert [rank["gap"] for rank in found[name]] == [0, 0]


def test_each_rank_keeps_two_snapshots_of_itself_and_of_its_peer(found):
    expected = [f"step-{step}.rank-{rank}-of-2.pt" for step in (4, 6) for rank in (0, 1)]
    assert [rank["kept"] for rank in found["Fabric"]] == [expected, expected]


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_a_trainer_removes_its_snapshots_at_the_end(found, name):
    assert [rank["kept"] for rank in found[name]] == [[], []]


def test_a_damaged_part_comes_from_the_peer_and_an_incomplete_snapshot_does_not_count(found):
    assert [rank["then"] for rank in found["Fabric"]] == [[6, 4, None], [6, 4, None]]


def test_strategies_with_shards_in_their_own_buffers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"PeerSnapshots \+ ZeROStrategy: its shards are in buffers of the strategy"):
        check_together([PeerSnapshots(tmp_path)], ft.ZeROStrategy(2))


def test_snapshots_of_another_number_of_ranks_are_not_loaded(tmp_path):
    net = nn.Linear(2, 1)
    PeerMemory(tmp_path).save(3, {"model": net})
    (tmp_path / "step-3.rank-0-of-1.pt").rename(tmp_path / "step-3.rank-0-of-4.pt")
    with pytest.warns(UserWarning, match="no complete snapshot of 1 ranks. Load a checkpoint"):
        assert PeerMemory(tmp_path).load({"model": net}) is None


def test_state_that_could_not_be_read_back_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint entry \['odd'\] of class object"):
        PeerMemory(tmp_path).save(1, {"odd": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_example_measures_peers_beside_files(tmp_path):
    arguments = ("--layers", "1", "--width", "16", "--times", "1", "--folder", tmp_path / "files", "--memory", tmp_path)
    line = last_line("cluster/peer_memory.py", *map(str, arguments), ranks=2)
    assert line.startswith("| load of a lost rank | ")
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_clear_removes_snapshots_and_nothing_else(tmp_path):
    peers = PeerMemory(tmp_path)
    (tmp_path / "mine.pt").touch()
    peers.save(1, {"model": nn.Linear(1, 1), "rows": torch.arange(3)})
    peers.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.pt"]


@contextmanager
def largest_file(nbytes):
    """Files in this process can be no larger, as where memory is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_memory_is_an_error_and_the_older_snapshot_stays(tmp_path):
    peers = PeerMemory(tmp_path)
    peers.save(1, {"model": nn.Linear(2, 1)})
    with largest_file(100 * 1024), pytest.raises(OSError, match="step 2 in .*: rank 0 cannot write it: file too large"):
        peers.save(2, {"model": nn.Linear(300, 300)})
    assert len(list(tmp_path.iterdir())) == 1
    assert peers.load({"model": nn.Linear(2, 1)}) == 1


def test_a_rank_that_cannot_write_is_an_error_on_all_ranks(found):
    assert all("step 7 in" in rank["full"] and "rank 1 cannot write it" in rank["full"] for rank in found["Fabric"])
    assert [rank["after"] for rank in found["Fabric"]] == [["step-8.rank-0-of-2.pt", "step-8.rank-1-of-2.pt"]] * 2


def test_a_run_goes_on_where_no_snapshot_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"PeerSnapshots\('.*file'\): no file can be created there"):
        fit(ShallowLM(), lm_batches(1), [PeerSnapshots(tmp_path / "file")])
    plain, net = ShallowLM(), ShallowLM()
    fit(plain, lm_batches(2))
    with largest_file(1024), pytest.warns(UserWarning, match="PeerMemory: the snapshot of step 2 in .* cannot write"):
        fit(net, lm_batches(2), [PeerSnapshots(tmp_path / "memory", every_n_steps=2)])
    assert largest_difference(weights(plain), weights(net)) == 0
    assert not list((tmp_path / "memory").iterdir())
