"""What examples/against.py makes of the runs: rows, judgement, table."""

import argparse
import importlib
import json

import pytest
import torch

from tests.support.run_example import ROOT


@pytest.fixture
def against(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("against")


def run(side, times_ms, peak_mib, losses=(3.0, 2.0), error=None):
    found = {"step_ms_all": times_ms, "peak_mib": peak_mib, "losses": losses, "tokens_per_step": 1000}
    return {"side": side, "error": error, **({} if error else found)}


def rounds(side, fastest_ms, peak_mib):
    return [run(side, [fastest, 10 * fastest], peak_mib) for fastest in fastest_ms]


def test_a_row_has_the_median_of_the_fastest_steps_and_their_spread(against):
    (row,) = against.summarise([run("hf", [50, 20], 7), run("hf", [90, 80], 8), run("hf", [30, 40], 8)])
    assert (row["step_ms"], row["step_ms_range"]) == (30, [20, 80])
    assert row["tokens_per_s"] == pytest.approx(1000 / 0.030)
    assert row["peak_mib"] == 8


def test_losses_are_compared_with_the_first_side_over_all_steps(against):
    first, second = run("hf", [1], 1, losses=(3.0, 2.5, 2.0)), run("loop", [1], 1, losses=(3.0, 2.25, 2.0))
    assert [row["loss_difference"] for row in against.summarise([first, second])] == [0.0, 0.25]


def test_a_side_that_failed_has_a_row_and_is_no_rival(against):
    rows = against.summarise([run("hf-compile", [], 0, error="no compiler"), *rounds("hf", [9, 9], 9)])
    assert [row["error"] for row in rows] == ["no compiler", None]
    assert "| HF, torch_compile | no compiler |" in against.markdown_table({"rows": rows})
    assert against.judge([*rows, *against.summarise(rounds("ours-fast", [3, 3], 9))])[0].startswith(
        "ours, fast, beside the fastest rival, HF Trainer: 3.00 times its tokens/s (we win)"
    )


def test_each_of_ours_is_held_against_the_best_of_its_kind(against):
    runs = [*rounds("hf", [10, 11], 900), *rounds("hf-parts", [20, 21], 400)]
    runs += [*rounds("ours-fast", [5, 6], 500), *rounds("ours-lean", [24, 25], 200)]
    fast, lean = against.judge(against.summarise(runs))
    assert "the fastest rival, HF Trainer: 1.91 times its tokens/s (we win), 0.56 times its memory (we win)" in fast
    assert "the leanest rival, HF, accumulation ×4: 0.84 times its tokens/s (we lose), 0.50 times its memory" in lean


def test_sides_that_attend_in_another_way_are_shown_and_not_compared(against):
    runs = [*rounds("loop", [4, 4], 100), *rounds("hf", [10, 10], 900), *rounds("ours-fast", [5, 5], 450)]
    for one, attention in zip(runs, ["masked"] * 2 + ["causal"] * 4, strict=True):
        one |= {"attention": attention, "optimizer": "AdamW", "precision": "bf16-mixed"}
    rows = against.summarise(runs)
    sentence, left_out = against.judge(rows)
    assert sentence.startswith("ours, fast, beside the fastest rival, HF Trainer: 2.00 times its tokens/s (we win)")
    assert left_out == "a loop, torch.compile (masked attention), with another attention, is not compared"
    assert "| a loop, torch.compile (masked attention) | 4 (4–4) |" in against.markdown_table({"rows": rows})
    for name, other in {"attention": "full", "optimizer": "SGD", "precision": "32-true", "settings": {}}.items():
        assert against.differences(rows[1], {**rows[2], name: other}) == [name]


@pytest.mark.parametrize(
    ("model", "name", "attention"),
    [
        ("llama", "lightning", "causal"),
        ("gpt2", "loop-layers", "causal"),
        ("llama", "loop-without-masks", "causal"),
        ("bert", "hf", "full"),
    ],
)
def test_how_a_side_attends_is_read_from_its_model(against, model, name, attention):
    options = argparse.Namespace(model=model, device="cpu", tokens=None, **against.SHAPES[model])
    rivals = importlib.import_module("rivals")
    assert rivals.attention_of(rivals.SIDES[name], options) == attention


def test_a_mask_of_the_callers_is_seen(against, monkeypatch):
    rivals = importlib.import_module("rivals")
    batch = {"input_ids": torch.ones(2, 16, dtype=torch.long), "labels": torch.ones(2, 16, dtype=torch.long)}
    hidden = {"attention_mask": torch.arange(16).expand(2, 16) > 3}
    monkeypatch.setattr(rivals, "build_loader", lambda options: [batch | hidden])
    options = argparse.Namespace(model="llama", device="cpu", tokens=None, **against.SHAPES["llama"])
    assert rivals.attention_of(rivals.SIDES["lightning"], options) == "masked"


def test_it_says_where_we_lose_and_where_nobody_wins(against):
    runs = [*rounds("hf", [10, 12], 500), *rounds("ours-fast", [11, 13], 600)]
    (sentence,) = against.judge(against.summarise(runs))
    assert "0.92 times its tokens/s (no difference beyond the spread), 1.20 times its memory (we lose)" in sentence


def test_one_round_is_not_judged_in_time(against):
    rows = against.summarise([*rounds("hf", [10], 500), *rounds("ours-fast", [1], 500)])
    assert "10.00 times its tokens/s (one round: not judged)" in against.judge(rows)[0]


def test_without_a_rival_nothing_is_judged(against):
    assert against.judge(against.summarise(rounds("ours-fast", [1, 1], 1))) == []


def test_the_table_has_a_line_for_each_side(against):
    lines = against.markdown_table({"rows": against.summarise(rounds("lightning", [1500, 2500, 2000], 1234.4))})
    assert lines.splitlines()[2] == "| Lightning Trainer | 2,000 (1,500–2,500) | 500 | 1,234 | 0e+00 |  |"


def test_sides_are_shown_as_a_share_of_the_speed_of_their_products(against):
    limit = run("products", [10], 1, losses=(0.0, 0.0))
    rows = against.summarise([limit, *rounds("hf", [20, 20], 9), *rounds("ours-fast", [12.5, 12.5], 9)])
    assert [row["share_of_limit"] for row in rows] == [1.0, 0.5, 0.8]
    assert [row.get("loss_difference") for row in rows] == [None, 0.0, 0.0]
    assert against.judge(rows)[0].startswith("ours, fast, beside the fastest rival, HF Trainer: 1.60 times")
    table = against.markdown_table({"rows": rows}).splitlines()
    assert table[2] == "| its matrix products alone | 10 (10–10) | 100,000 |  |  | 100% |"
    assert table[4] == "| ours, fast | 12 (12–12) | 80,000 | 9 | 0e+00 | 80% |"


def test_the_table_of_models_beside_rivals_is_what_was_measured(against):
    """To mend it: ``python examples/against.py --table`` with these files, between the two marks."""
    folder = ROOT / "examples" / "results"
    names = ["", "_llama_fp32", "_bert_bf16", "_bert_fp32", "_vit_bf16", "_vit_fp32"]
    measured = [json.loads((folder / f"against{name}_cpu.json").read_text()) for name in names]
    written = (folder / "README.md").read_text().split("<!-- beside -->\n")[1].split("\n<!-- /beside -->")[0]
    assert written == against.beside_rivals(measured)
    assert all(row["rounds"] > 1 for result in measured for row in result["rows"])


def test_ours_are_held_against_the_fastest_and_the_leanest_rival(against):
    runs = [
        run("products", [5], 1, losses=(0.0, 0.0)),
        *rounds("hf", [10, 10], 900),
        *rounds("hf-parts", [20, 20], 400),
    ]
    runs += [*rounds("ours-fast", [8, 8], 450), *rounds("ours-lean", [25, 25], 200)]
    runs += rounds("ours-lean-in-one", [16, 16], 300)
    result = {"settings": {"model": "vit", "precision": "32-true"}, "rows": against.summarise(runs)}
    ours = "ours, lean, 4 parts | ×0.80, ×0.50"
    expected = f"| vit | 32-true | HF Trainer | ×1.25, ×0.50 | HF, accumulation ×4 | {ours} | 50%, 62% |"
    assert against.beside_rivals([result]).splitlines()[2] == expected


def test_the_table_of_rivals_is_what_was_measured(against):
    """To mend it: ``python examples/against.py --table examples/results/against_cpu.json``, between the two marks."""
    results = (ROOT / "examples" / "results" / "README.md").read_text()
    result = json.loads((ROOT / "examples" / "results" / "against_cpu.json").read_text())
    assert results.split("<!-- rivals -->\n")[1].split("\n<!-- /rivals -->")[0] == against.markdown_table(result)
    rows = {row["side"]: row for row in result["rows"]}
    assert all(row["rounds"] == 3 for row in rows.values())
    share = rows["ours-lean"]["peak_mib"] / rows["hf-all"]["peak_mib"]
    assert f"{share:.2f} times what Hugging Face's three" in " ".join(results.split())
