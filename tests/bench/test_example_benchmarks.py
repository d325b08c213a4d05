"""The examples that measure print, and write, what they measured."""

import json

import pytest

from tests.support.run_example import last_line

pytestmark = pytest.mark.benchmark


@pytest.mark.slow
def test_the_overhead_benchmark_writes_ratios_with_their_intervals(tmp_path):
    out = tmp_path / "results.json"
    last_line("overhead.py", "--steps", "60", "--turns", "2", "--out", str(out))
    result = json.loads(out.read_text())
    assert {"all techniques", "MicroBatching", "FiniteGuard"} <= {row["kind"] for row in result["empty_step"]}
    for row in result["empty_step"] + result["busy_step"]:
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    assert result["reading_us"]["one mean"] > 0
    assert list(result["narrow_gpt"]) == ["not compiled", "compiled blocks", "blocks compiled as one"]


@pytest.mark.slow
def test_a_leak_shows_in_the_memory_of_a_run(tmp_path):
    out = tmp_path / "results.json"
    last_line("steady_memory.py", "--steps", "3000", "--hosts", "Fabric,control", "--out", str(out))
    fabric, control = json.loads(out.read_text())["rows"]
    assert fabric["bytes_per_step"] < control["bytes_per_step"] > 1024
    assert len(fabric["open_files"]) == len(fabric["threads"]) == 1


@pytest.mark.slow
def test_single_techniques_compute_the_same_loss(tmp_path):
    out = tmp_path / "results.json"
    last_line("single_techniques.py", "--scale", "1", "--turns", "2", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert {row["case"] for row in rows} == {"mlp", "probing", "latents", "conv", "attention"}
    plain = {row["case"]: row for row in rows if row["kind"] == "plain"}
    for row in rows:
        if row["case"] in plain:
            assert row["loss"] == pytest.approx(plain[row["case"]]["loss"], rel=1e-5)
    tiled = next(row for row in rows if row["kind"] == "tiled")
    assert tiled["added_mib"] < 0.6 * plain["mlp"]["added_mib"]


@pytest.mark.slow
def test_architectures_are_compared_with_the_model_without(tmp_path):
    out = tmp_path / "results.json"
    last_line(
        "architecture.py",
        "--steps",
        "2",
        "--out",
        str(out),
        smaller=[("context=128, layers=6", "context=16, layers=2")],
    )
    rows = json.loads(out.read_text())["rows"]
    parameters = {row["side"]: row["parameters"] for row in rows}
    assert parameters["Upcycling(4, top_k=2)"] > parameters["dense"]
    assert [row["time_ratio"] for row in rows if row["side"] in ("plain", "dense", "with biases")] == [1, 1, 1]


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
def test_offloading_is_compared_on_any_device(tmp_path):
    out = tmp_path / "results.json"
    little = ["--size", "nano", "--batch", "1", "--steps", "1", "--stages", "0,3+offload"]
    last_line("gpu/zero_offload.py", *little, "--out", str(out))
    rows = {row["stage"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(row["fits"] for row in rows.values())
    assert rows["3+offload"]["predicted_host_gib"] > rows["0"]["predicted_host_gib"] == 0


@pytest.mark.slow
def test_all_sides_train_the_same(tmp_path):
    out = tmp_path / "results.json"
    little = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "512", "--batch", "4", "--length", "32"]
    sides = ["--sides", "lightning,hf,hf-parts,hf-recompute,loop,ours-fast,ours-lean,ours-lean-in-one"]
    few = ["--precision", "32-true", "--rounds", "1", "--steps", "1"]
    last = last_line("against.py", *little, *sides, *few, "--out", str(out))
    assert last.startswith("ours, fast, beside the fastest rival, ")
    rows = {row["side"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 8
    assert all(row["error"] is None and row["loss_difference"] < 1e-4 for row in rows.values()), rows
    assert rows["ours-lean"]["peak_mib"] < rows["lightning"]["peak_mib"]
    assert rows["lightning"]["last_loss"] < rows["lightning"]["first_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pieces",
    [
        "doctor,ceilings,tests,prediction,gpt2 loop 1,gpt2 ours-fast 1",
        "ladder,parity naive,parity top",
        "cold start,offload,chunked loss,qlora ours,experts 4 bits,low precision,zero offload",
    ],
)
def test_the_proof_runs_through_without_a_gpu(pieces, tmp_path):
    said = last_line("gpu/prove.py", "--tiny", "--only", pieces, "--minutes", "9.5", "--out", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line["piece"]: line["status"] for line in lines if line["status"] != "done"} == (
        {"offload": "skipped: needs a CUDA device"} if "offload" in pieces.split(",") else {}
    ), said
    assert {line["piece"] for line in lines} == set(pieces.split(","))
    last_line("gpu/prove.py", "--report", str(tmp_path))
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.slow
def test_a_cold_start_is_compared_with_a_second_one(tmp_path):
    out = tmp_path / "results.json"
    assert last_line("compile_cold_start.py", "--blocks", "1", "--out", str(out)).startswith("1 blocks:")
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["blocks", "whole"]
