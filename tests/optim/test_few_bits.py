"""8-bit state and compensated bfloat16 weights train the reference GPT like float32; plain bfloat16 does not."""

import dataclasses
import importlib
import json
import statistics

import pytest
import torch

from tests.support.run_example import ROOT

RESULTS = ROOT / "examples" / "results"


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("bf16_alone")
    monkeypatch.setattr(example, "CONFIG", dataclasses.replace(example.CONFIG, context=32))
    return example.train


@pytest.mark.parametrize(("name", "rate", "steps"), [("adamw", 1e-3, 50), ("lion", 1e-4, 40)])
def test_eight_bit_state_matches_float32_within_one_percent(train, name, rate, steps):
    pytest.importorskip("bitsandbytes")
    full, full_state = train(name, lr=rate, steps=steps)
    low, low_state = train(f"{name}8bit", lr=rate, steps=steps)
    assert statistics.mean(low) == pytest.approx(statistics.mean(full), rel=0.01)
    assert full[0] - full[-1] > 0.5  # the loss has decreased
    assert low_state < 0.3 * full_state


def test_pure_bfloat16_stalls_and_kahan_does_not(train):
    full, plain, kahan = (
        statistics.mean(train(steps=80, dtype=dtype, updates=updates)[0][-20:])
        for dtype, updates in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "kahan"))
    )
    assert plain > full * 1.01
    assert kahan == pytest.approx(full, rel=0.004)


def test_the_documented_figures_are_the_measured_ones():
    """Check the figures in examples/results/README.md."""
    text = (RESULTS / "README.md").read_text()
    for file in ("bf16_alone_cpu.json", "few_bits_cpu.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            name = row["run"]
            line = f"| {name} | {row['last_loss']:.3f} | {row['mean_loss']:.3f} | {row['state_bytes']:.2f} |"
            assert line in text
