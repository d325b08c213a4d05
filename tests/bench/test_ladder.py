import io
import itertools
import json
import re

import pytest
from rich.console import Console

from lightning_fasttrain._messages import FULL_WIDTH
from lightning_fasttrain.bench import ladder as ladder_module
from lightning_fasttrain.bench import process, report
from lightning_fasttrain.bench.gpt import GPTConfig
from lightning_fasttrain.bench.ladder import climb, number_of_runs
from lightning_fasttrain.bench.preparation import prepare
from lightning_fasttrain.bench.process import run_in_fresh_process
from lightning_fasttrain.bench.rungs import Rung, rungs
from lightning_fasttrain.bench.sizes import Size
from lightning_fasttrain.cli import main

MICRO = Size(GPTConfig(context=64, layers=2, heads=2, width=16), batch=8, steps=2)


def four_rungs(micro_batches):
    named = {rung.name: rung for rung in rungs(micro_batches)}
    broken = Rung("broken", "a rung that fails", {"callbacks": {"MicroBatching": {"n": 0}}})
    gpu_only = Rung("gpu", "only on a GPU", {}, needs="tpu")
    return (named["micro-batches"], broken, gpu_only, named["checkpointing"])


def by_memory_alone(row, top, time_noise):
    """In the place of ``judge``: steps of a few milliseconds are too short for a time to decide a test."""
    return row["error"] is None and row["peak_mib"] < 0.95 * top["peak_mib"], "by memory alone"


@pytest.fixture(scope="module", autouse=True)
def _no_clock():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "judge", by_memory_alone)
        yield


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """A whole ladder, really run: naive, strong, three rungs of which one fails, and the bare loop."""
    out = tmp_path_factory.mktemp("ladder")
    ladder = prepare(MICRO, out=out, ladder=four_rungs, repeats=1)
    finished = []
    result = climb(ladder, lambda row: finished.append(row["name"]), lambda title, line: None)
    assert finished == ["naive", "strong", "micro-batches", "broken", "checkpointing", "bare-loop"]
    return out, result


def by_name(result):
    return {row["name"]: row for row in result["rungs"]}


@pytest.mark.slow
def test_exact_rungs_have_naives_losses(climbed):
    rows = by_name(climbed[1])
    for name in ("micro-batches", "checkpointing"):
        assert rows[name]["exactness"] == "exact"
        assert rows[name]["max_loss_delta"] < 1e-5
        assert rows[name]["losses"] == pytest.approx(rows["naive"]["losses"], abs=1e-5)
    assert climbed[1]["bare_loop"]["error"] is None
    assert climbed[1]["bare_loop"]["max_loss_delta"] < 1e-5


@pytest.mark.slow
def test_losses_would_differ_if_the_training_did(climbed):
    losses = by_name(climbed[1])["naive"]["losses"]
    assert min(abs(a - b) for a, b in itertools.pairwise(losses)) > 1e-3


@pytest.mark.slow
def test_a_failed_rung_says_why_and_the_others_go_on(climbed):
    rows = by_name(climbed[1])
    assert rows["broken"]["error"].startswith("ValueError: n=0: it counts things")
    assert (rows["broken"]["step_ms"], rows["broken"]["carried"]) == (None, False)
    assert rows["checkpointing"]["error"] is None
    assert "MicroBatching" in rows["checkpointing"]["state"]["callbacks"]


@pytest.mark.slow
def test_memory_falls_and_is_carried(climbed):
    rows = by_name(climbed[1])
    assert rows["micro-batches"]["carried"]
    assert rows["micro-batches"]["peak_mib"] < rows["naive"]["peak_mib"] / 2
    assert climbed[1]["top"]["memory_ratio"] > 2


@pytest.mark.slow
def test_the_json_has_the_documented_keys_and_names_no_machine(climbed):
    out, result = climbed
    text = (out / "ladder.json").read_text()
    assert json.loads(text) == result
    assert {"hardware", "versions", "command", "date", "model", "rungs"} <= set(result)
    keys = {"name", "exactness", "step_ms", "tokens_per_s", "peak_mib", "loss", "max_loss_delta", "error"}
    assert all(keys <= set(row) for row in result["rungs"])
    assert not re.search(r"/(home|root|tmp|work|usr)/", text)
    assert result["skipped"] == [{"name": "gpu", "title": "only on a GPU", "reason": "needs tpu"}]


@pytest.mark.slow
def test_the_table_and_the_picture_show_it(climbed):
    pytest.importorskip("matplotlib")
    out, result = climbed
    console = Console(width=FULL_WIDTH, record=True, file=io.StringIO())
    console.print(report.as_table(result))
    text = console.export_text()
    for words in (
        "micro-batches ×4",
        "failed: ValueError",
        "skipped: needs tpu",
        "max |Δloss|",
        "the Trainer's step takes",
    ):
        assert words in text
    assert "tokens/s" not in {column.header for column in report.as_table(result, width=100).columns}
    picture = report.save_picture(result, out / "ladder.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "times less memory" in report.summary(result)


@pytest.mark.slow
def test_the_command_with_each_rung_alone(tmp_path, capsys, monkeypatch):
    from lightning_fasttrain.bench import sizes

    monkeypatch.setitem(sizes.SIZES, "micro", MICRO)
    (tmp_path / "private.txt").write_text("the quick brown fox " * 500)
    arguments = ["--size", "micro", "--text", str(tmp_path / "private.txt"), "--out", str(tmp_path / "out")]
    code = main(["ladder", *arguments, "--each", "--steps", "1", "--repeats", "1", "--rungs", "micro-batches,fused"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "each rung alone" in printed
    result = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert [row["name"] for row in result["rungs"]] == ["naive", "micro-batches", "fused"]
    assert result["rungs"][2]["alone"]["peak_mib"] > result["rungs"][2]["peak_mib"]
    assert result["command"].endswith("--each --rungs micro-batches,fused --text private.txt")
    assert result["strong"] is None


def test_a_process_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(process, "_WORKER", ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    assert "most likely out of memory" in run_in_fresh_process({}, lambda line: None)["error"]


def test_a_process_that_cannot_start_is_reported_without_paths(monkeypatch):
    monkeypatch.setattr(process, "_WORKER", ["-c", "raise SystemExit('no such thing in /opt/some/place.py')"])
    assert run_in_fresh_process({}, lambda line: None)["error"] == "no such thing in …/place.py"


def test_a_process_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(process, "_WORKER", ["-c", "import time; time.sleep(60)"])
    assert run_in_fresh_process({}, lambda line: None, limit_s=0.2)["error"] == "stopped after 0.2 s"


def test_progress_is_passed_on_and_noise_is_not(monkeypatch):
    heard = []
    monkeypatch.setattr(process, "_WORKER", ["-c", "print('hello'); print('{\"step\": 1}'); print(3)"])
    run_in_fresh_process({}, heard.append)
    assert heard == [{"step": 1}]


def test_the_number_of_runs_is_known_beforehand(tmp_path):
    ladder = prepare(MICRO, out=tmp_path, ladder=four_rungs, each=True, repeats=2)
    assert number_of_runs(ladder) == 2 * (1 + 2 + 3 * 2)


def test_attention_batch_and_steps_are_taken_over(tmp_path):
    ladder = prepare(MICRO, out=tmp_path, attention="naive", batch=4, steps=7, names=["strong"])
    assert (ladder.size.model.attention, ladder.size.batch, ladder.size.steps) == ("naive", 4, 7)
    assert (ladder.rungs, ladder.baselines) == ((), ("strong",))


def test_no_picture_without_matplotlib(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.save_picture({"rungs": []}, tmp_path / "x.png") is None
