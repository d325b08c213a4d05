"""The scan of transformers' classes compares with what does not use the techniques, and can find them wrong."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
scan = pytest.importorskip("examples.transformers_classes")
small = pytest.importorskip("examples.small_transformers")

RESULTS = Path(__file__).parents[1] / "examples/results"


@pytest.mark.parametrize(
    ("kind", "name", "setting"),
    [("gpt2", "GPT2LMHeadModel", "LoRA on 4 bits"), ("mixtral", "MixtralForCausalLM", "LoRA on 4 bits")],
)
def test_adapters_train_as_parametrizations_do(kind, name, setting, monkeypatch):
    assert scan.is_right(scan.compare("causal", kind, name, setting, {}))
    monkeypatch.setattr(
        scan.LowRank, "forward", lambda self, weight: weight + 1.01 * self.scale * (self.b @ self.a).sum()
    )
    assert not scan.is_right(scan.compare("causal", kind, name, setting, {}))


def test_weights_are_compared_with_those_of_the_plain_run():
    which = ("masked", "bert", "BertForMaskedLM")
    net, batch, _ = scan.build(*which)
    plain = scan.fit(net, batch, [])
    assert scan.is_right(scan.compare(*which, "micro-batches", plain))
    name = next(iter(plain))
    plain[name] = plain[name] + 1e-3 * torch.ones_like(plain[name])
    assert not scan.is_right(scan.compare(*which, "micro-batches", plain))


def test_classes_are_counted_as_right_refused_or_neither():
    row = {"difference": 1e-7, "moved": 1e-2}
    rows = {"right": row, "still": {**row, "moved": 0.0}, "refused": {"refused": "why"}, "raised": {"raised": "why"}}
    classes = {name: {"plain": {"difference": 0.0}, "LoRA": row} for name, row in rows.items()}
    lines = scan.summarize({**classes, "other": {"not built": "why"}}).splitlines()
    assert lines[0] == "5 classes, 4 built small"
    assert "LoRA: 1 right, 1 refused, 2 others still raised" in lines
    with pytest.raises(RuntimeError, match="shape"):
        scan.build("causal", "musicgen", "MusicgenForCausalLM")


@pytest.mark.parametrize(
    ("task", "kind", "name", "inputs"),
    [
        ("vision-language", "gemma3", "Gemma3ForConditionalGeneration", "text and images"),
        ("vision-language", "qwen2_vl", "Qwen2VLForConditionalGeneration", "text and images"),
        ("speech", "whisper", "WhisperForConditionalGeneration", "sound"),
    ],
)
def test_batches_have_the_images_and_sounds_that_a_model_reads(task, kind, name, inputs):
    built = scan.build(task, kind, name)
    assert built.inputs == inputs
    plain = scan.fit(built.net, built.batch, [])
    assert scan.is_right(scan.compare(task, kind, name, "micro-batches", plain))


def test_images_that_a_model_ignores_are_not_counted():
    net, batch, _ = scan.build("causal", "llama", "LlamaForCausalLM")
    with pytest.raises(ValueError, match="does not depend on pixel_values"):
        small.refuse_untrainable(net, {**batch, "pixel_values": torch.randn(6, 3)}, "text and images")


def test_counts_of_the_readme_are_those_of_the_file():
    classes = json.loads((RESULTS / "transformers_classes_cpu.json").read_text())["classes"]
    section = (RESULTS / "README.md").read_text().partition("## Classes of transformers")[2].partition("\n## ")[0]
    total, *rows = scan.summarize(classes).splitlines()
    assert f"Of {total.split()[0]} classes, {total.split()[2]} could be built" in " ".join(section.split())
    counted = [line.split(": ")[1].replace("others", "neither").split()[::2][:3] for line in rows]
    written = [line.split("|")[2:5] for line in section.splitlines() if line.startswith("| `")]
    assert [[cell.strip() for cell in row] for row in written] == counted
