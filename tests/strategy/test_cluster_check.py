"""The check of a cluster names ranks and faults, and ends within its limit."""

import json

import pytest

from lightning_fasttrain.cli.main import main
from lightning_fasttrain.strategy import _cluster_findings, cluster_check
from lightning_fasttrain.strategy._cluster_findings import ClusterReport
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    launch = Ranks("tests.strategy.cluster_scenarios", folder, log=folder / "log", count=3)
    codes, _, errors = launch.end(timeout_s=90)
    reports = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    return {"codes": codes, "errors": errors, **reports}


def named(report, what):
    return [finding for finding in report["findings"] if what in finding]


def test_each_pair_is_measured(found):
    assert set(found["whole-0"]["pairs"]) == {"(0, 1)", "(0, 2)", "(1, 2)"}
    assert min(found["whole-0"]["pairs"].values()) > 0
    assert "rank 2: " in found["whole-0"]["text"]
    assert named(found["whole-0"], "clock") == named(found["whole-0"], "differs") == []


def test_a_rank_with_other_code_is_named(found):
    (finding,) = named(found["faults-0"], "the model's code differs")
    assert "on ranks 0, 1; " in finding
    assert "on rank 2" in finding


def test_a_clock_that_is_ahead_is_named(found):
    (finding,) = named(found["faults-0"], "clock")
    assert "the clock of rank 1" in finding
    assert "100.0 s ahead of rank 0's" in finding


def test_a_rank_that_does_not_come_is_named(found):
    assert "rank 1 did not come within 1 s" in found["missing-0"]["error"]
    assert "rank 2 did not reach the others" in found["missing-2"]["error"]


def test_a_rank_that_hangs_ends_all_within_the_limit_and_is_named(found):
    assert found["codes"][0] == 1
    assert "clock did not end within 2 s; behind it: rank 2 (disk): " in found["errors"]


def test_slow_ranks_and_pairs_are_named():
    usual = {"gflops": 100.0, "write_mib_s": 50.0, "read_mib_s": 50.0}
    ranks = {rank: {"host": f"node{rank}", **usual} for rank in range(4)}
    ranks[3]["gflops"], ranks[1]["write_mib_s"] = 10.0, 5.0
    slow = list(_cluster_findings.find_slow_ranks(ranks))
    assert slow[0].startswith("rank 3 (node3) has 10 GFLOP/s")
    assert slow[1].startswith("rank 1 (node1) has 5 MiB/s written")
    pairs = {"nccl": {(0, 1): 100.0, (0, 2): 100.0, (1, 2): 20.0}}
    (finding,) = _cluster_findings.find_slow_pairs(pairs)
    assert finding.startswith("ranks 1 and 2 exchange 20 MiB/s over nccl")


def test_the_command_reports_one_machine(capsys, tmp_path):
    assert main(["cluster-check", "--folder", str(tmp_path), "--mib", "1"]) == 0
    assert "No fault was found." in capsys.readouterr().out


def test_the_command_ends_with_an_error_if_there_is_a_finding(capsys, monkeypatch):
    def find_fault(**settings):
        return ClusterReport({}, findings=["rank 1 has another torch."])

    monkeypatch.setattr(cluster_check, "check_cluster", find_fault)
    assert main(["cluster-check"]) == 1
    assert "rank 1 has another torch." in capsys.readouterr().out
