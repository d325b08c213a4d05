import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule, Size
from lightning_fasttrain.bench.ladder import picture, report
from lightning_fasttrain.bench.ladder import run_ladder as climb_module
from lightning_fasttrain.bench.ladder import turns as turns_module
from lightning_fasttrain.bench.ladder.preflight import prepare
from lightning_fasttrain.bench.ladder.results import Climbed, compare_in_turn
from lightning_fasttrain.bench.ladder.run_ladder import as_code, climb, number_of_rows
from lightning_fasttrain.bench.ladder.rungs import Rung, on_top_of, rungs, strong_baselines
from lightning_fasttrain.bench.ladder.turns import FEWEST_ROUNDS, Worker, WorkerError
from lightning_fasttrain.bench.text import batches
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.technique import Exactness

MICRO = Size(GPTConfig(context=64, layers=2, heads=2, width=16), batch=8, steps=2)


def four_rungs(micro_batches, mixed):
    named = {rung.name: rung for rung in rungs(micro_batches)}
    broken = Rung("broken", "a rung that fails", {"callbacks": {"MicroBatching": {"n": 0}}})
    elsewhere = Rung("elsewhere", "not on this device", {}, needs="tpu")
    return (named["micro-batches"], broken, elsewhere, named["checkpointing"])


def baselines_compiled_quickly(mixed):
    """In the place of ``strong_baselines``: without the minute that a C++ compiler takes."""
    strong, compiled = strong_baselines(mixed)
    return strong, replace(compiled, change=on_top_of(compiled.change, {"loop": {"compile": {"backend": "eager"}}}))


def by_memory_alone(row, below, naive):
    """In the place of ``judge_row``: steps of a few milliseconds are too short for a time to decide a test."""
    return row.error is None and row.peak_mib < 0.95 * below.peak_mib, "by memory alone"


@pytest.fixture(scope="module", autouse=True)
def _no_clock():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climb_module, "judge_row", by_memory_alone)
        yield


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """A whole ladder, really run: naive, three rungs of which one fails, bare loop, padded texts, and the finals."""
    out = tmp_path_factory.mktemp("ladder")
    ladder = replace(prepare(MICRO, out=out, ladder=four_rungs, turns=3), baselines=("strong", "bare-loop", "padded"))
    finished = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climb_module, "strong_baselines", baselines_compiled_quickly)
        result = climb(ladder, lambda row: finished.append(row.name), lambda title, message: None)
    rows = ["naive", "micro-batches", "broken", "checkpointing", "bare-loop", "padded", "trimmed"]
    assert finished == rows
    assert len(finished) == number_of_rows(ladder)
    return out, result


def by_name(result):
    return {row.name: row for row in result.rungs}


@pytest.mark.slow
def test_exact_rungs_have_naives_losses(climbed):
    rows = by_name(climbed[1])
    for name in ("micro-batches", "checkpointing"):
        assert rows[name].exactness is Exactness.EXACT
        assert rows[name].max_loss_delta < 1e-5
        # Naive has run more turns, as every other state is compared with it in the end.
        count = len(rows[name].losses)
        assert count > 5
        assert rows[name].losses == pytest.approx(rows["naive"].losses[:count], abs=1e-5)
    assert climbed[1].bare_loop.error is None
    assert climbed[1].bare_loop.max_loss_delta < 1e-5


@pytest.mark.slow
def test_losses_would_differ_if_the_training_did(climbed):
    losses = by_name(climbed[1])["naive"].losses
    assert min(abs(a - b) for a, b in itertools.pairwise(losses)) > 1e-3


@pytest.mark.slow
def test_a_failed_rung_says_why_and_the_others_go_on(climbed):
    rows = by_name(climbed[1])
    assert rows["broken"].error.startswith("ValueError: MicroBatching(n=0): it must be at least 1")
    assert math.isnan(rows["broken"].step_ms)
    assert not rows["broken"].carried
    assert rows["checkpointing"].error is None
    assert "MicroBatching" in rows["checkpointing"].state["callbacks"]


@pytest.mark.slow
def test_memory_falls_and_is_carried(climbed):
    rows = by_name(climbed[1])
    assert rows["micro-batches"].carried
    assert rows["micro-batches"].peak_mib < rows["naive"].peak_mib / 2
    lean = climbed[1].tops.get("lean")
    if lean is not None:  # the time of such a small step may be anything
        assert lean["memory_ratio"] > 2
        assert "ft.MicroBatching(n=4)" in lean["code"]


@pytest.mark.slow
def test_every_time_is_the_one_below_times_the_ratio_of_turns(climbed):
    rows = by_name(climbed[1])
    naive, above = rows["naive"], rows["micro-batches"]
    assert naive.step_ms == pytest.approx(statistics.median(ms for (ms,) in naive.turns_ms))
    for row, base in [(above, naive), (rows["checkpointing"], above)]:
        assert row.compared == base.name
        assert len(row.turns_ms) == 3
        low, ratio, high = row.ratio
        logs = [math.log(own / other) for other, own in row.turns_ms]
        assert ratio == pytest.approx(math.exp(statistics.fmean(logs)))
        assert low < ratio < high
        assert row.step_ms == pytest.approx(base.step_ms * ratio)
        assert row.plus_minus >= base.plus_minus


@pytest.mark.slow
def test_every_ratio_of_a_stack_is_from_turns_with_what_it_is_compared_with(climbed):
    result = climbed[1]
    ran = {row.name: row for row in result.finals}
    assert list(ran)[:4] == ["naive", "strong", "compiled", "products"]
    assert [len(row.turns_ms) for row in result.finals] == [FEWEST_ROUNDS] * len(ran)
    assert [row.error for row in result.finals] == [None] * len(ran)
    for row in result.finals[:3]:
        assert row.max_loss_delta < 0.05  # the same training
        assert row.step_ms == pytest.approx(statistics.median(ms for (ms,) in row.turns_ms))
    for top in result.tops.values():
        assert set(top["against"]) == {"naive", "strong", "compiled"}
        for name, found in top["against"].items():
            ratio = compare_in_turn(ran[top["name"]], ran[name])
            assert found["speedup"] == 1 / ratio.value
            assert found["memory_ratio"] == ran[name].peak_mib / top["peak_mib"]


class ThreeSteps(L.Trainer):
    """In the place of ``L.Trainer`` in code that is pasted."""

    def __init__(self, **pasted):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        super().__init__(accelerator="cpu", max_steps=3, logger=False, **quiet, **pasted)


@pytest.mark.slow
def test_the_code_shown_trains_as_it_was_measured(climbed, tmp_path, monkeypatch):
    tokens = prepare(MICRO, out=tmp_path, names=[]).tokens
    monkeypatch.setattr(L, "Trainer", ThreeSteps)
    for row in (row for row in climbed[1].rungs if row.error is None):
        pasted: dict = {}
        exec(as_code(row.state), pasted)
        losses: list[float] = []
        note = LambdaCallback(on_train_batch_end=lambda *told, losses=losses: losses.append(told[2]["loss"].item()))
        pasted["trainer"].callbacks.append(note)
        torch.manual_seed(0)
        module = GPTModule(MICRO.model, **row.state["optimizer"])
        pasted["trainer"].fit(module, batches(tokens, MICRO.model.context, MICRO.batch, 3))
        assert losses == pytest.approx(row.losses[:3], abs=1e-6)


@pytest.mark.slow
def test_padded_texts_train_the_same_without_their_padding_and_in_less_memory(climbed):
    whole, cut = climbed[1].padded
    assert cut.compared == whole.name
    assert cut.max_loss_delta < 1e-4 * whole.loss  # products of other sizes round differently, and steps add to it
    assert cut.peak_mib < whole.peak_mib
    assert cut.verdict.endswith("than with padding.")


@pytest.mark.slow
def test_the_json_has_the_documented_keys_and_names_no_machine(climbed):
    out, result = climbed
    text = (out / "ladder.json").read_text()
    written = json.loads(text)
    assert Climbed.read(out / "ladder.json") == result
    assert {"hardware", "versions", "command", "date", "model", "rungs"} <= set(written)
    keys = {"name", "exactness", "step_ms", "tokens_per_s", "peak_mib", "loss", "max_loss_delta", "error"}
    assert all(keys <= set(row) for row in written["rungs"])
    assert not re.search(r"/(home|root|tmp|work|usr)/", text)
    assert [row["step_ms"] is None for row in written["rungs"]] == [False, False, True, False]
    assert result.skipped == [{"name": "elsewhere", "title": "not on this device", "reason": "needs tpu"}]
    assert isinstance(result.hardware["bf16_units"], list)


@pytest.mark.slow
def test_the_table_and_the_picture_show_it(climbed):
    pytest.importorskip("matplotlib")
    out, result = climbed
    text = report.as_table(result).as_text(200)
    for words in ("micro-batches ×4", "failed", "skipped: needs tpu", "max |Δloss|", "The Trainer's step takes"):
        assert words in text
    finals = [replace(row, disturbed_cores=9.0) for row in result.finals]
    said = report.summary(replace(result, finals=finals), 200)
    assert "Failed: a rung that fails: ValueError: MicroBatching(n=0)" in said
    assert "Other processes kept up to 9.0 cores busy during" in said
    drawn = picture.save_picture(result, out / "ladder.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_loses_no_words(climbed, width):
    tables = report.as_table(climbed[1]), report.as_table_of_finals(climbed[1])
    lines = [line for table in filter(None, tables) for line in table.as_text(width).splitlines()]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for row in climbed[1].rungs:
        assert row.title in text
    assert "MiB" in text


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    from lightning_fasttrain.bench import gpt

    monkeypatch.setitem(gpt.SIZES, "micro", MICRO)

    def run_twice(spec, on_progress, limit_s):
        if "MicroBatching" in spec["state"]["callbacks"]:
            raise KeyboardInterrupt
        return Worker(spec, on_progress, limit_s)

    monkeypatch.setattr(turns_module, "Worker", run_twice)
    code = main(["ladder", "--size", "micro", "--out", str(tmp_path), "--rungs", "prefetch,micro-batches,release"])
    captured = capsys.readouterr()
    assert code == 130
    assert "what was measured is kept" in captured.err
    result = Climbed.read(tmp_path / "ladder.json")
    assert [row.name for row in result.rungs] == ["naive", "prefetch"]
    assert result.interrupted
    assert "no host syncs" in captured.out


@pytest.mark.slow
def test_the_command_with_each_rung_alone(tmp_path, capsys, monkeypatch):
    from lightning_fasttrain.bench import gpt

    monkeypatch.setitem(gpt.SIZES, "micro", MICRO)
    (tmp_path / "private.txt").write_text("the quick brown fox " * 500)
    arguments = ["--size", "micro", "--text", str(tmp_path / "private.txt"), "--out", str(tmp_path / "out")]
    code = main(["ladder", *arguments, "--each", "--steps", "1", "--turns", "3", "--rungs", "micro-batches,release"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "each rung alone" in printed
    result = Climbed.read(tmp_path / "out" / "ladder.json")
    assert [row.name for row in result.rungs] == ["naive", "micro-batches", "release"]
    assert result.rungs[2].alone.peak_mib > result.rungs[2].peak_mib
    assert result.command.endswith("--each --rungs micro-batches,release --text private.txt")
    assert {row.name for row in result.finals} <= {"naive", "micro-batches", "release"}


@pytest.mark.slow
def test_naive_may_be_compared_with_every_other_state(tmp_path, monkeypatch):
    """Its process, which ends with its last turn, has more of them than any ladder takes."""
    monkeypatch.setattr(climb_module, "judge_row", lambda row, below, naive: (False, "not carried."))
    monkeypatch.setattr(climb_module, "_choose_candidates", lambda naive, rows, limit_mib: rows)
    ladder = prepare(MICRO, out=tmp_path, names=["micro-batches", "checkpointing"], turns=3, steps=1)
    result = climb(ladder, lambda row: None, lambda title, message: None)
    assert [row.error for row in result.rungs] == [None] * 3
    assert [row.compared for row in result.rungs[1:]] == ["naive", "naive"]
    assert [row.error for row in result.finals] == [None] * 3


def end_of(work, **settings):
    """How a worker that never pauses ends."""
    worker = Worker({"device": "cpu"}, settings.pop("on_progress", lambda message: None), work=work, **settings)
    with pytest.raises(WorkerError) as error:
        worker.pause()
    worker.close()
    return str(error.value)


def ends_at_once(spec, result_file, stderr_file, teller):
    os.kill(os.getpid(), signal.SIGKILL)


def cannot_start(spec, result_file, stderr_file, teller):
    stderr_file.write_text("Traceback\nImportError: no such thing in /opt/some/place.py\n")
    os._exit(1)


def hangs(spec, result_file, stderr_file, teller):
    time.sleep(60)


def tells_and_fails(spec, result_file, stderr_file, teller):
    teller.send({"step": 1})
    result_file.write_text(json.dumps({"error": f"OSError: {spec['device']} is full at /mnt/some/disk"}))


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (ends_at_once, "the process was killed (signal 9): most likely out of memory"),
        (cannot_start, "ImportError: no such thing in …/place.py"),
        (tells_and_fails, "OSError: cpu is full at …/disk"),
    ],
)
def test_how_a_process_ended_is_reported_without_paths(work, error):
    assert end_of(work) == error


def test_a_process_that_hangs_is_stopped():
    assert end_of(hangs, limit_s=0.2) == "stopped after 0.2 s"


def test_a_process_may_take_the_time_that_is_left_and_what_others_took():
    assert turns_module.TimeLeft(rows=3, limit_s=math.inf).limit_s() == 3600
    assert turns_module.TimeLeft(rows=3, limit_s=200).limit_s() == 3600  # nothing is known of the machine yet
    time_left = turns_module.TimeLeft(rows=3, limit_s=200)
    time_left.starts_s, time_left.turns_s = [20.0, 30.0], [1.0]
    assert time_left.limit_s() == pytest.approx(200, abs=1)
    time_left.end = time.monotonic()
    assert time_left.limit_s() == 90
    time_left.starts_s = [1.0]
    assert time_left.limit_s() == 60


def test_progress_is_passed_on():
    heard = []
    end_of(tells_and_fails, on_progress=heard.append)
    assert heard == [{"step": 1}]


def test_attention_batch_and_steps_are_taken_over(tmp_path):
    ladder = prepare(MICRO, out=tmp_path, attention="naive", batch=4, steps=7, names=["strong"])
    assert (ladder.size.model.attention, ladder.size.batch, ladder.size.steps) == ("naive", 4, 7)
    assert (ladder.rungs, ladder.baselines) == ((), ("strong",))


def test_no_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert picture.save_picture(None, tmp_path / "x.png") is None


@pytest.mark.benchmark
def test_two_ladders_beside_a_busy_process_carry_the_same(tmp_path):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    names = ["micro-batches", "chunked-loss", "checkpointing"]
    try:
        ladders = [prepare("nano", out=tmp_path, names=names, batch=16, steps=1, minutes=4) for _ in range(2)]
        results = [climb(ladder, lambda row: None, lambda title, message: None) for ladder in ladders]
    finally:
        busy.kill()
        busy.wait()
    first, second = ([(row.name, row.carried) for row in result.rungs] for result in results)
    assert first == second
