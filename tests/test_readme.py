"""The README says what the code does: its figures are those measured, its code is code, its commands exist."""

import ast
import importlib
import json
import math
import operator
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.report import as_table_of_finals, describe_limit
from lightning_fasttrain.bench.ladder.results import Climbed, Row
from lightning_fasttrain.cli.main import main
from tests.support.nets import as_loader

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "examples" / "results" / "README.md").read_text()


def test_it_can_be_read_in_five_minutes():
    assert len(README.splitlines()) <= 130


def test_what_it_points_to_is_there():
    for text, folder in ((README, ROOT), (RESULTS, ROOT / "examples" / "results")):
        named = re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|ipynb|json|png|yaml|md))`", text)
        named += re.findall(r"\]\(([^)#:]+)\)", text)
        assert named
        for name in named:
            assert (folder / name).exists() or (ROOT / name).exists(), name


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def describe_ladder(ladder):
    """What README says of the stacks of a ladder."""
    fast, balanced, lean = (ladder.tops[name] for name in ("fast", "balanced", "lean"))
    compiled = fast["against"]["compiled"]
    return (
        f"the fast one is {fast['speedup']:.1f} times as fast as the naive loop in {fast['memory_ratio']:.1f} times "
        f"less memory, {compiled['speedup']:.2f} times as fast as `torch.compile` with bf16 in "
        f"{compiled['memory_ratio']:.1f} times less; the balanced one {balanced['speedup']:.1f} times as fast as naive "
        f"in {balanced['memory_ratio']:.1f} times less, the lean one {lean['speedup']:.1f} times in "
        f"{lean['memory_ratio']:.1f} times less."
    )


def test_the_words_about_the_ladder_are_what_was_measured():
    ladder = Climbed.read(ROOT / "examples" / "results" / "ladder_cpu.json")
    readme, results = " ".join(README.split()), " ".join(RESULTS.split())
    assert f"On two CPU cores with bf16 units, {describe_ladder(ladder)}" in readme
    assert f"variation of the same program there, {ladder.noise['time']:.0%}." in results
    assert describe_limit(ladder) in results
    written = RESULTS.split("<!-- ladder cpu -->\n")[1].split("\n<!-- /ladder cpu -->")[0].splitlines()
    table = as_table_of_finals(ladder)
    rows = [table.headings, ["---"] * len(table.headings)]
    rows += [["".join(cell) for cell in cells] for cells, _ in table.rows]
    assert written == [f"| {' | '.join(row)} |" for row in rows]


def test_the_table_of_simulated_ladders_is_what_was_computed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    as_row = importlib.import_module("judge_simulation").as_row
    rows = json.loads((ROOT / "examples" / "results" / "judge_simulation.json").read_text())["rows"]
    written = RESULTS.split("<!-- judge -->\n")[1].split("\n<!-- /judge -->")[0].splitlines()[2:]
    assert written == [as_row(row) for row in rows]
    assert max(row["wrong"] for row in rows if row["rule"] == "in turn") < 0.02


def test_the_table_of_fine_tuning_is_what_was_measured():
    rows = json.loads((ROOT / "examples" / "results" / "finetune_minilm_cpu.json").read_text())["rows"]
    for row in rows:
        assert (
            f"| {row['way']} | {row['accuracy']:.1%} | {row['trained share']:.2%} | {row['peak MiB']:.0f} |" in RESULTS
        )


def test_the_table_of_large_models_is_what_was_predicted():
    written = RESULTS.split("<!-- finetune memory -->\n")[1].split("\n<!-- /finetune memory -->")[0].splitlines()[2:]
    rows = json.loads((ROOT / "examples" / "results" / "finetune_memory_predicted.json").read_text())["rows"]
    for line, row in zip(written, rows, strict=True):
        name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        kinds, step = row["weights"], row["step"]
        found = [sum(kinds.values()), *(kinds[kind] for kind in ("4 bits", "embeddings", "heads", "adapters"))]
        assert name == row["model"]
        assert cells == [f"{cell:.2f}" for cell in (*found, step["optimizer state"], step["peak"])]


PREDICTED = {
    "predictions": ("memory_prediction_cpu", "memory_prediction_families_cpu", "memory_prediction_families_avx2"),
    "cuda predictions": ("memory_prediction_cuda",),
}


@pytest.mark.parametrize("table", PREDICTED)
def test_the_tables_of_predictions_are_what_was_measured(table):
    written = RESULTS.split(f"<!-- {table} -->\n")[1].split(f"\n<!-- /{table} -->")[0].splitlines()
    ways = [cell.strip() for cell in written[0].split("|")[2:-1]]
    cells = {
        (line.split("|")[1].strip(), way): cell.strip()
        for line in written[2:]
        for way, cell in zip(ways, line.split("|")[2:-1], strict=True)
    }
    files = [ROOT / "examples" / "results" / f"{name}.json" for name in PREDICTED[table]]
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    found = {(r["model"], r["way"]): f"{r['predicted_bytes'] / r['measured_bytes'] - 1:+.1%}" for r in rows}
    assert {key: cell for key, cell in cells.items() if cell} == found


def test_no_figure_of_the_allocator_alone_is_called_a_gpus():
    measured = json.loads((ROOT / "examples" / "results" / "memory_prediction_cuda.json").read_text())
    if measured["device"].startswith("no GPU"):
        assert measured["hardware"]["gpu"] is None
        assert "no GPU has computed" in RESULTS


def test_the_table_of_a_gpu_is_what_was_measured(monkeypatch):
    for folder in ("gpu", ""):
        monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
    prove, report = importlib.import_module("prove"), importlib.import_module("proof_report")
    lines = prove.last_lines(ROOT / "examples" / "results" / "h200")
    written = RESULTS.split("<!-- h200 -->\n")[1].split("\n<!-- /h200 -->")[0].splitlines()[2:]
    expected = []
    for model in report.MODELS:
        for row in sorted(report.gpt2_rows(lines, model), key=lambda row: row["step_ms"]):
            expected.append(f"| {report.MODELS[model]} | {' | '.join(report.gpt2_cells(row))} |")
    assert written == expected
    rows = {row["side"]: row for row in report.gpt2_rows(lines)}
    naive, fast, lean = (rows[side] for side in ("naive", "ours-fast", "ours-lean-graphs"))
    faster, leaner = naive["step_ms"] / fast["step_ms"], naive["peak_mib"] / lean["peak_mib"]
    said = f"{faster:.1f} times as fast as a naive float32 loop, or takes {leaner:.0f} times less memory"
    said += f" at {naive['step_ms'] / lean['step_ms']:.1f} times its speed"
    assert said in " ".join(README.split())
    ours, theirs = (
        report.result_of(lines, f"qlora {side}") for side in ("ours + FusedLossHead", "peft + transformers")
    )
    said = "takes {:.2f} GiB at {:,.0f} tokens/s, beside {:.2f} GiB at {:,.0f} tokens/s for PEFT"
    figures = [row[key] for row in (ours, theirs) for key in ("peak_gib", "tokens_per_s")]
    assert said.format(*figures) in " ".join(RESULTS.split())
    naive, top = (report.result_of(lines, f"parity {way}")["losses"] for way in ("naive", "top"))
    ends = [f"{sum(losses[-50:]) / 50:.3f}" for losses in (naive, top)]
    assert f"of the last 50 is {ends[0]} in the naive float32 loop and {ends[1]} in" in " ".join(RESULTS.split())


@pytest.mark.parametrize("card", ["h200", "h100"])
def test_the_ladder_of_a_gpu_is_what_was_measured(card):
    written = RESULTS.split(f"<!-- ladder {card} -->\n")[1].split(f"\n<!-- /ladder {card} -->")[0].splitlines()[2:]
    file = ROOT / "examples" / "results" / f"ladder_{card}.json"
    rungs, strong = Climbed.read(file).rungs, Row.read(json.loads(file.read_text())["strong"])
    naive, rows = rungs[0], [*rungs, replace(strong, carried=True)]
    expected = []
    for row in (row for row in rows if row.error is None):
        title = row.title if row.carried else f"({row.title})"
        interval = f" ±{100 * row.plus_minus:.0f}%" if row.plus_minus else ""
        cells = [title, f"{row.step_ms:.1f}{interval}", f"{naive.step_ms / row.step_ms:.2f}"]
        cells += [f"{row.peak_mib:,.0f}", f"{naive.peak_mib / row.peak_mib:.1f}"]
        expected.append(f"| {' | '.join(cells)} |")
    assert written == expected


def test_what_an_h100_measured_of_single_techniques_is_in_the_text():
    lines = (ROOT / "examples" / "results" / "h100" / "lines.jsonl").read_text().splitlines()
    result = {line["piece"]: line["result"] for line in map(json.loads, lines)}
    text = " ".join(RESULTS.split())
    plain, compiled, ours, both, _, liger = result["chunked loss"]["rows"]
    for row in (plain, compiled, liger):
        assert f"{row['step_ms']:.0f} ms and {row['added_mib']:,.0f} MiB of" in text
    said = f"take {ours['step_ms']:.0f} ms and {ours['added_mib']:,.0f} MiB, and compiled {both['step_ms']:.0f} ms"
    assert said in text
    ways = {row["way"]: row for row in result["low precision"]["rows"]}
    base, eight = ways["bf16 compiled"], ways["float8 compiled"]
    said = f"{eight['step_ms'] / base['step_ms']:.2f} times as long as in bf16 ({eight['step_ms']:.0f} ms instead of"
    assert f"{said} {base['step_ms']:.0f})" in text
    assert f"in {eight['peak_gib'] / base['peak_gib']:.2f} times the memory" in text
    slow = [f"{ways[way]['step_ms'] / ways['bf16']['step_ms']:.1f}" for way in ("float8", "int8")]
    assert f"{slow[0]} times as long as in bf16; int8 without them took {slow[1]} times as long" in text


def test_what_an_h200_measured_of_single_techniques_is_in_the_text():
    folder, text = ROOT / "examples" / "results" / "h200", " ".join(RESULTS.split())
    lines = (folder / "lines.jsonl").read_text().splitlines()
    result = {line["piece"]: line["result"] for line in map(json.loads, lines)}
    then = {(row["size"], row["way"]): row for row in result["offload"]["results"]}
    now = {row["way"]: row for row in json.loads((folder / "recomputation_gpt2_small.json").read_text())["results"]}
    before = [then["gpt2-small", way]["step_ms"] for way in ("plain", "checkpointing")]
    after = [now[way]["step_ms"] for way in ("checkpointing", "plain")]
    said = "took {:.1f} ms, and with every block recomputed through PyTorch's checkpoint {:.1f} ms"
    assert said.format(*before) in text
    assert "it takes {:.1f} ms beside {:.1f} ms".format(*after) in text
    assert f"at 55 GB/s: {then['gpt2-xl', 'offload']['time_ratio']:.1f} times as long" in text
    kept, recomputed, *_ = result["budget gpt2-xl"]["rows"]
    said = f"takes {recomputed['time_ratio']:.2f} times as long with every block recomputed, in "
    said += f"{recomputed['peak_gib']:.2f} GiB instead of {kept['peak_gib']:.2f}; "
    said += f"{recomputed['predicted_gib']:.2f} and {kept['predicted_gib']:.2f} GiB had been predicted"
    assert said in text
    ways = {row["way"]: row for row in result["low precision 4096"]["rows"]}
    base, eight, int8 = (ways[f"{kind} compiled"] for kind in ("bf16", "float8", "int8"))
    said = f"takes {eight['step_ms'] / base['step_ms']:.2f} times as long as in bf16 ({eight['step_ms']:.0f} ms instead"
    assert f"{said} of {base['step_ms']:.0f}), in {eight['peak_gib'] / base['peak_gib']:.2f} times the memory" in text
    assert f"In int8 it takes {int8['step_ms'] / base['step_ms']:.1f} times as long" in text
    rows = {row["side"]: row for row in result["step profile"]["rows"]}
    lean, graphs, in_one = (rows[f"ours-lean{end}"] for end in ("", "-graphs", "-in-one"))
    said = (
        f"{lean['kernels']:,} kernels, which take {lean['kernel_ms']:.0f} ms, and the host needs {lean['host_ms']:.0f}"
    )
    assert f"{said} ms" in text
    assert f"the host needs {graphs['host_ms']:.0f} ms; in one, {in_one['kernels']:,} kernels take" in text


def test_the_pauses_of_the_garbage_collector_are_what_was_measured():
    rows = json.loads((ROOT / "examples" / "results" / "garbage_collection_cpu.json").read_text())["rows"]
    plain, ours = rows
    said = "A step took {:.1f} ms in the mean and {:.0f} ms at most, and with it {:.1f} ms and {:.0f} ms"
    figures = [row[key] for row in rows for key in ("mean_ms", "longest_ms")]
    assert said.format(*figures) in " ".join(RESULTS.split())
    shares = f"{plain['share_of_collections']:.1%} of the time, with it {ours['share_of_collections']:.1%}"
    assert shares in " ".join(RESULTS.split())


def test_what_became_of_damaged_files_is_what_was_counted():
    rows = json.loads((ROOT / "examples" / "results" / "fuzzed_files_cpu.json").read_text())["rows"]
    inputs, refused = (sum(row[key] for row in rows) for key in ("inputs", "refused"))
    wrong, text = sum(len(row["wrong"]) for row in rows), " ".join(RESULTS.split())
    assert f"read {inputs:,} mutated files with {len(rows)} readers" in text
    assert f"{refused:,} were refused by name, the others loaded; {wrong} ended otherwise" in text


def test_plans_are_as_good_as_what_a_search_found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    as_row = importlib.import_module("plan_against_search").as_row
    rows = json.loads((ROOT / "examples" / "results" / "plan_against_search.json").read_text())["rows"]
    written = RESULTS.split("<!-- plans -->\n")[1].split("\n<!-- /plans -->")[0].splitlines()[2:]
    assert written == [as_row(row) for row in rows]
    assert len(rows) >= 6
    slower = [f"{row['ratio'][0] - 1:.0%} slower" for row in rows if row["ratio"][1] > 1.05]
    assert len(slower) <= 1
    assert all(one in " ".join(RESULTS.split()) for one in slower)
    assert all(abs(row["predicted_gib"] / row["measured_gib"] - 1) < 0.1 for row in rows)
    assert all(row["plan_s"] < 120 for row in rows)


def test_the_runs_of_the_tests_are_those_on_file():
    runs = json.loads((ROOT / "examples" / "results" / "steady_tests_cpu.json").read_text())["runs"]
    busy, older, shuffled = (sum(bool(run[name]) for run in runs) for name in ("busy_neighbour", "kernels", "order"))
    seconds = [run["seconds"] for run in runs]
    text = " ".join(RESULTS.split())
    assert f"All {len(runs)} runs of one commit passed: {runs[0]['passed']:,} tests each" in text
    assert f"{busy} of them beside a busy core, {older} with kernels for older processors and {shuffled} with" in text
    assert f"A run took {min(seconds):,} to {max(seconds):,} s" in text
    assert {(run["code"], run["passed"], run["commit"]) for run in runs} == {(0, runs[0]["passed"], runs[0]["commit"])}
    assert len(runs) >= 20


def test_the_table_of_the_chunked_loss_is_what_was_measured():
    written = RESULTS.split("<!-- chunked loss -->\n")[1].split("\n<!-- /chunked loss -->")[0].splitlines()[2:]
    rows = json.loads((ROOT / "examples" / "results" / "chunked_loss_cpu.json").read_text())["rows"]
    assert len(written) == 2
    for line in written:
        vocabulary, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        found = [row for row in rows if f"{row['vocabulary']:,}" == vocabulary]
        assert cells == [f"{row['step_ms']:.0f} ms, {row['added_mib']:.0f} MiB" for row in found]


def test_the_table_of_single_techniques_is_what_was_measured():
    written = (
        RESULTS.split("<!-- single techniques -->\n")[1].split("\n<!-- /single techniques -->")[0].splitlines()[2:]
    )
    rows = json.loads((ROOT / "examples" / "results" / "single_techniques_cpu.json").read_text())["rows"]
    expected = []
    for row in rows:
        if row["case"] != "attention":
            ratio = f"×{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})"
            cells = [row["case"], row["kind"], f"{row['step_ms']:,.0f} ms", ratio, f"{row['added_mib']:,.0f} MiB"]
            expected.append(f"| {' | '.join(cells)} |")
    assert written == expected


def test_the_table_of_padded_batches_is_what_was_measured():
    written = RESULTS.split("<!-- ragged -->\n")[1].split("\n<!-- /ragged -->")[0].splitlines()[2:]
    measured = json.loads((ROOT / "examples" / "results" / "ragged_cpu.json").read_text())["distributions"]
    expected = []
    for one in measured:
        whole, *others = one["ways"]
        cells = [one["lengths"], f"{one['padding']:.0%}", f"{whole['added_mib']:,.0f} MiB"]
        for way in others:
            speed = f"×{way['speed']:.2f} ({way['slowest']:.2f}–{way['fastest']:.2f})"
            cells.append(f"{speed}, {way['added_mib']:,.0f} MiB")
        expected.append(f"| {' | '.join(cells)} |")
    assert written == expected
    errors = {one["lengths"]: max(way["error"] for way in one["ways"]) for one in measured}
    assert f"{max(errors[kind] for kind in ('text', 'log-normal', 'bimodal')):.0e}, those of speech" in RESULTS.replace(
        "\n", " "
    )
    assert f"speech to {errors['speech']:.0e}," in RESULTS
    speeds = [one["ways"][2]["speed"] for one in measured]
    shares = [one["padding"] for one in measured]
    words = (
        f"×{min(speeds):.1f} to ×{max(speeds):.1f} on batches that are {min(shares):.0%} to {max(shares):.0%} padding"
    )
    assert words in README


def test_the_table_of_trainers_on_padded_batches_is_what_was_measured():
    written = RESULTS.split("<!-- ragged trainers -->\n")[1].split("\n<!-- /ragged trainers -->")[0].splitlines()[2:]
    measured = json.loads((ROOT / "examples" / "results" / "ragged_cpu.json").read_text())["trainers"]
    expected = []
    for one in measured:
        cells = [one["lengths"]]
        for side in one["sides"]:
            speed = one["sides"][0]["epoch_ms"] / side["epoch_ms"]
            cells.append(f"{side['epoch_ms'] / 1e3:.1f} s, ×{speed:.2f}")
        expected.append(f"| {' | '.join(cells)} |")
    assert written == expected


def test_the_table_of_bookkeeping_is_what_was_measured():
    written = RESULTS.split("<!-- overhead -->\n")[1].split("\n<!-- /overhead -->")[0].splitlines()[2:]
    measured = json.loads((ROOT / "examples" / "results" / "overhead_cpu.json").read_text())
    expected = []
    for part, step in (("empty_step", "an empty step"), ("busy_step", "a step that waits 20 ms")):
        for row in measured[part]:
            ratio = f"×{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
            expected.append(f"| {step} | {row['kind']} | {ratio} | {row['us']:+,.0f} µs |")
    assert written == expected
    uncompiled, torchs, blocks, one = measured["narrow_gpt"].values()
    times = f"takes {uncompiled:.1f} ms, {torchs:.1f} ms with PyTorch's checkpoint in place of the package's own, "
    times += f"{blocks:.1f} ms with compiled blocks, and {one:.1f} ms"
    assert times in " ".join(RESULTS.split())


def test_the_table_of_architectures_is_what_was_measured():
    written = RESULTS.split("<!-- architecture -->\n")[1].split("\n<!-- /architecture -->")[0].splitlines()[2:]
    measured = json.loads((ROOT / "examples" / "results" / "architecture_cpu.json").read_text())
    assert f"{measured['steps']} steps of {measured['tokens_per_step']} tokens" in RESULTS
    expected = []
    for row in measured["rows"]:
        losses = f"{row['loss']:.3f} | {row['held_out_loss']:.3f}"
        time = f"{row['step_ms']:.0f} ms, ×{row['time_ratio']:.2f}"
        expected.append(f"| {row['comparison']} | `{row['side']}` | {losses} | {time} | {row['parameters']:,} |")
    assert written == expected


def test_the_table_of_what_a_proof_costs_is_what_was_measured():
    written = RESULTS.split("<!-- proof cost -->\n")[1].split("\n<!-- /proof cost -->")[0].splitlines()[2:]
    rows = json.loads((ROOT / "examples" / "results" / "proof_cost_cpu.json").read_text())["rows"]
    expected = []
    for row in rows:
        cells = [row["size"], f"{row['step_s']:.1f} s, {row['step_peak_bytes'] / 2**30:.1f} GiB"]
        for side in ("verify", "rehearsal"):
            cells.append(f"{row[f'{side}_steps']:.1f} steps, {row[f'{side}_more_parameters']:+.1f} × the parameters")
        expected.append(f"| {' | '.join(cells)} |")
    assert written == expected


def test_the_table_of_killed_runs_is_what_was_found():
    written = RESULTS.split("<!-- kills -->\n")[1].split("\n<!-- /kills -->")[0].splitlines()[2:]
    expected = []
    for campaign in ("kill_campaign_cpu", "kill_campaign_replicas_cpu", "kill_campaign_third_cpu"):
        found = json.loads((ROOT / "examples" / "results" / f"{campaign}.json").read_text())
        assert found["troubled_runs"] == []
        for row in found["rows"]:
            kinds = ", ".join(f"{count} {kind}" for kind, count in row["kinds"].items())
            outcome = f"{row['runs_that_end_otherwise']} | {row['lost_checkpoints']}"
            expected.append(f"| {row['strategy']}, {row['processes']} | {row['runs']} | {kinds} | {outcome} |")
    assert written == expected


def test_the_table_of_long_runs_is_what_was_measured():
    written = RESULTS.split("<!-- steady memory -->\n")[1].split("\n<!-- /steady memory -->")[0].splitlines()[2:]
    rows = json.loads((ROOT / "examples" / "results" / "steady_memory_cpu.json").read_text())["rows"]
    expected = []
    for row in rows:
        slope = f"{row['bytes_per_step']:,.0f} ({row['pieces_low']:,.0f} to {row['pieces_high']:,.0f})"
        files, threads = (" or ".join(map(str, row[name])) for name in ("open_files", "threads"))
        expected.append(f"| {row['host']} | {row['steps']:,} | {slope} | {files} | {threads} |")
    assert written == expected
    *hosts, control = rows
    assert all(row["bytes_per_step"] < 1024 for row in hosts)
    assert control["bytes_per_step"] > 1024


def test_the_cold_start_is_what_was_measured():
    rows = json.loads((ROOT / "examples" / "results" / "compile_cold_start_cpu.json").read_text())["rows"]
    blocks, whole = (row for row in rows if row["blocks"] == 24)
    cold = f"{blocks['cold']['s']:.0f} s by blocks and {whole['cold']['s']:.0f} s whole"
    again = f"{blocks['again']['s']:.0f} s and {whole['again']['s']:.0f} s in a second start"
    assert f"at 24 blocks, {cold}, {again}.\n" in RESULTS


def test_the_comparison_of_strategies_is_what_the_command_prints(capsys):
    command, _, written = RESULTS.split("$ fasttrain shard")[1].split("```")[0].partition("\n")
    assert main(["shard", *command.split()]) == 0
    assert written.split() == capsys.readouterr().out.split()


def test_its_python_is_python():
    assert len(blocks("python")) == 4
    for block in blocks("python"):
        ast.parse(block)


def test_the_stack_that_it_shows_is_the_one_that_was_measured():
    shown, measured = blocks("python")[0], Climbed.read(ROOT / "examples" / "results" / "ladder_cpu.json").tops
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(measured["balanced"]["code"]))


def test_its_adapter_is_read_without_the_package(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained("base")
    read = []

    class Auto:
        @staticmethod
        def from_pretrained(folder):
            read.append(transformers.AutoModelForCausalLM.from_pretrained(folder))
            return read[-1]

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Auto.from_pretrained("base")

        def training_step(self, batch):
            return self.net(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    ids = torch.randint(99, (4, 8))
    loader = as_loader([{"input_ids": ids, "labels": ids}] * 2)
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    code = blocks("python")[1].replace('precision="bf16-mixed"', "precision='32-true', max_steps=2, **quiet")
    names = {"L": L, "ft": ft, "module": module, "loader": loader, "base": "base", "quiet": quiet}
    exec(code, {**names, "AutoModelForCausalLM": Auto})
    trained, alone = ({n: v for n, v in net.named_parameters() if "lora" in n} for net in (module.net, read[-1]))
    assert len(trained) == len(alone) == 2 * 7 * 2  # A and B of seven layers in two blocks
    for mine, theirs in zip(trained.values(), alone.values(), strict=True):
        assert torch.equal(mine, theirs)
    assert any("lora_B" in name and value.any() for name, value in alone.items())


def test_its_commands_use_extras_and_scripts_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run, test, *_ = blocks("bash")
    assert "fasttrain ladder" in run
    assert "fasttrain" in project["scripts"]
    assert "&& .venv/bin/pytest " in test
    for extra in re.findall(r"\[(\w+)\]", run + test):
        assert extra in project["optional-dependencies"]


def calls_in_the_table():
    """Names of the package that the table "What hurts, and what to add" calls."""
    table = README.split("## What hurts")[1].split("\n## ")[0]
    return sorted(set(re.findall(r"`(?:ft\.)?([\w.]+)\(", table)) - {"help"})


def test_the_names_in_the_table_exist():
    assert len(calls_in_the_table()) > 20
    for name in calls_in_the_table():
        operator.attrgetter(name)(ft)


SMALL_TABLES = {
    "min snr": (
        "min_snr_cpu",
        lambda row: [
            row["run"],
            *(f"{distance:.1f}" for distance in row["distances"]),
            ", ".join(f"{distance:.1f}" for distance in row["last_by_seed"]),
        ],
    ),
    "resizing": (
        "progressive_resizing_cpu",
        lambda row: [row["run"], f"{row['seconds']:.1f} s", f"{row['accuracy']:.1%}"],
    ),
    "superbpe": (
        "superbpe_cpu",
        lambda row: [
            row["encoding"],
            f"{row['bytes_per_token']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['bytes_per_s']:,.0f}",
            f"{row['bits_per_byte']:.3f}",
        ],
    ),
}


@pytest.mark.parametrize("table", SMALL_TABLES)
def test_the_tables_of_small_examples_are_what_was_measured(table):
    file, cells_of = SMALL_TABLES[table]
    written = RESULTS.split(f"<!-- {table} -->\n")[1].split(f"\n<!-- /{table} -->")[0].splitlines()[2:]
    rows = json.loads((ROOT / "examples" / "results" / f"{file}.json").read_text())["rows"]
    assert written == [f"| {' | '.join(cells_of(row))} |" for row in rows]


SCALE = {
    "scale memory": ("scale_memory", RESULTS),
    "published": ("scale_published", RESULTS),
    "counts": ("scale_counts", (ROOT / "docs" / "scale.md").read_text()),
}


def measured_scale(name):
    files = (ROOT / "examples" / "results").glob(f"{name}*.json")
    return json.loads(next(files).read_text())


@pytest.mark.parametrize("table", SCALE)
def test_the_tables_of_scale_are_what_was_measured(table, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    name, text = SCALE[table]
    measured = measured_scale(name)
    written = text.split(f"<!-- {table} -->\n")[1].split(f"\n<!-- /{table} -->")[0].splitlines()
    assert written == importlib.import_module(name).as_lines(measured["rows"])
    assert measured.get("largest_error", 0) < 0.05


def growth_error(row):
    """Return the error at 16 ranks of the growth through the counts at 2, 4 and 8."""
    counts = {int(ranks): count for ranks, count in row["counts"].items()}
    ranks = [4, 8] if row["growth"] == "linear" else [2, 4, 8]
    expected = sum(counts[n] * math.prod((16 - m) / (n - m) for m in ranks if m != n) for n in ranks)
    return abs(expected / counts[16] - 1)


def test_the_errors_of_predictions_for_many_devices_are_those_measured():
    table = RESULTS.split("| predicted for many devices |")[1].split("\n\n")[0]
    assert f"| at most {measured_scale('scale_memory')['largest_error']:.1%} |" in table
    counts = [row for row in measured_scale("scale_counts")["rows"] if "growth" in row and row["counts"]["16"]]
    assert f"| at most {max(map(growth_error, counts)):.1%} |" in table
    errors = [row["predicted"] / row["published"] - 1 for row in measured_scale("scale_published")["rows"]]
    assert f"| {errors[0]:+.1%} and {errors[1]:+.1%} |" in table
    assert f"| {min(errors[2:-1]):+.1%} to {max(errors[2:-1]):+.1%} |" in table
    assert f"| {errors[-1]:+.1%} |" in table
    assert f"llm.c, whose MFU is {0.4 * (1 + errors[-1]):.0%} |" in table


def test_what_tune_said_and_what_it_gained_is_in_the_text():
    rows = json.loads((ROOT / "examples" / "results" / "tune_foreign_cpu.json").read_text())["rows"]
    measured = [row for row in rows if "measured" in row]
    assert len(measured) == 9
    for row in measured:
        said, (applied, *_) = row["said"], row["measured"]["gain"]
        times = "×{:.2f} ({:.2f} to {:.2f})".format(*said)
        name = row["script"].replace("_", " ")
        assert re.search(rf"^\| {name} \| .* \| {re.escape(times)} \| ×{applied:.2f} \|", RESULTS, re.MULTILINE), name
        is_alone = any("on one of 2 ranks alone" in note for note in row["notes"])
        assert is_alone or abs(applied / said[0] - 1) < 0.1
        assert all(low < 1.05 for _, low, _ in row["singles"]["final"].values()), name
    assert not any(row["traceback"] or row["files_left"] for row in rows)
