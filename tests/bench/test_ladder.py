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

import pytest

from lightning_fasttrain.bench.gpt import GPTConfig, Size
from lightning_fasttrain.bench.ladder import report
from lightning_fasttrain.bench.ladder import run_ladder as climb_module
from lightning_fasttrain.bench.ladder import turns as turns_module
from lightning_fasttrain.bench.ladder.preflight import prepare
from lightning_fasttrain.bench.ladder.results import Climbed
from lightning_fasttrain.bench.ladder.run_ladder import climb, number_of_rows
from lightning_fasttrain.bench.ladder.rungs import Rung, rungs
from lightning_fasttrain.bench.ladder.turns import Worker, WorkerError
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.technique import Exactness

MICRO = Size(GPTConfig(context=64, layers=2, heads=2, width=16), batch=8, steps=2)


def four_rungs(micro_batches, mixed):
    named = {rung.name: rung for rung in rungs(micro_batches)}
    broken = Rung("broken", "a rung that fails", {"callbacks": {"MicroBatching": {"n": 0}}})
    elsewhere = Rung("elsewhere", "not on this device", {}, needs="tpu")
    return (named["micro-batches"], broken, elsewhere, named["checkpointing"])


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
    """A whole ladder, really run: naive, strong, three rungs of which one fails, the bare loop, and padded texts."""
    out = tmp_path_factory.mktemp("ladder")
    ladder = prepare(MICRO, out=out, ladder=four_rungs, turns=3)
    finished = []
    result = climb(ladder, lambda row: finished.append(row.name), lambda title, message: None)
    rows = ["naive", "strong", "micro-batches", "broken", "checkpointing", "bare-loop", "padded", "trimmed"]
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
    leanest = climbed[1].tops["leanest"]
    if leanest is not None:  # the time of such a small step may be anything
        assert leanest["memory_ratio"] > 2
        assert "ft.MicroBatching(n=4)" in leanest["code"]


@pytest.mark.slow
def test_every_time_is_the_one_below_times_the_ratio_of_turns(climbed):
    rows = by_name(climbed[1])
    naive, above = rows["naive"], rows["micro-batches"]
    assert naive.step_ms == pytest.approx(statistics.median(ms for (ms,) in naive.turns_ms))
    for row, base in [(above, naive), (rows["checkpointing"], above), (climbed[1].strong, naive)]:
        assert row.compared == base.name
        assert len(row.turns_ms) == 3
        low, ratio, high = row.ratio
        logs = [math.log(own / other) for other, own in row.turns_ms]
        assert ratio == pytest.approx(math.exp(statistics.fmean(logs)))
        assert low < ratio < high
        assert row.step_ms == pytest.approx(base.step_ms * ratio)
        assert row.plus_minus >= base.plus_minus


@pytest.mark.slow
def test_the_headline_is_measured_once_more_in_turn_with_naive(climbed):
    for top in filter(None, climbed[1].tops.values()):
        assert top["again"]
        assert top["speedup"] == pytest.approx(climbed[1].rungs[0].step_ms / top["step_ms"])


@pytest.mark.slow
def test_padded_texts_train_the_same_without_their_padding_and_in_less_memory(climbed):
    whole, cut = climbed[1].padded
    assert cut.compared == whole.name
    assert cut.max_loss_delta < 1e-5 * whole.loss  # products of other sizes round differently
    assert cut.peak_mib < whole.peak_mib
    assert cut.verdict.endswith("than with padding.")


@pytest.mark.slow
def test_printed_ratios_are_quotients_of_printed_times(climbed):
    text = report.as_table(climbed[1]).as_text(200)
    rows = re.findall(r"^\(?([a-z][^)\n]*?)\)?  +([\d.,]+)  +([\d.]+)(?: ±[\d.]+)?  ", text, flags=re.MULTILINE)
    times = {name.strip(): (float(ms.replace(",", "")), float(speed)) for name, ms, speed in rows}
    naive_ms, _ = times["naive loop"]
    assert len(times) >= 4
    for name, (ms, speed) in times.items():
        if not name.startswith("padded"):
            assert speed == pytest.approx(naive_ms / ms, abs=0.011), name


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
    for words in ("micro-batches ×4", "failed", "skipped", "max |Δloss|", "The Trainer's step takes"):
        assert words in text
    assert "Skipped: not on this device: needs tpu." in report.summary(result)
    assert "Failed: a rung that fails: ValueError: MicroBatching(n=0)" in report.summary(result)
    assert "Other processes" in report.summary(replace(result, strong=replace(result.strong, disturbed_cores=1.0)))
    picture = report.save_picture(result, out / "ladder.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_loses_no_words(climbed, width):
    lines = report.as_table(climbed[1]).as_text(width).splitlines()
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
    assert result.strong is None


@pytest.mark.slow
def test_naive_may_be_compared_with_every_other_state(tmp_path, monkeypatch):
    """Its process, which ends with its last turn, has more of them than any ladder takes."""
    monkeypatch.setattr(climb_module, "judge_row", lambda row, below, naive: (False, "not carried."))
    monkeypatch.setattr(climb_module, "fastest_with_half_the_memory", lambda rows, noise: rows[min(1, len(rows) - 1)])
    monkeypatch.setattr(climb_module, "leanest_in_time", lambda rows, noise: rows[-1])
    ladder = prepare(MICRO, out=tmp_path, names=["micro-batches", "checkpointing"], turns=3, steps=1)
    result = climb(ladder, lambda row: None, lambda title, message: None)
    assert [row.error for row in result.rungs] == [None] * 3
    assert [row.compared for row in result.rungs[1:]] == ["naive", "naive"]
    assert all(top["again"] for top in result.tops.values())


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
    assert report.save_picture(None, tmp_path / "x.png") is None


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
