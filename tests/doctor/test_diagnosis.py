"""The order of findings, the page, and what is said of models whose operators cannot be seen."""

import json
import shutil
import subprocess

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.doctor import Cost, Diagnosis, Finding, SourceLine, save_diagnosis
from lightning_fasttrain.doctor.diagnosis import cost_of_calls, cost_of_phase, cost_of_samples, rank

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def finding(kind, ms=None, unit="ms"):
    cost = None if ms is None else Cost(ms, ms / 2, 2 * ms, unit)
    return Finding(kind, "<b>what</b> & [why]", "cure", "exact", SourceLine(__file__, 1), cost)


FOUND = [
    finding("small", 0.5),
    finding("large", 40.0),
    finding("fault"),
    finding("memory", 4.0, "bytes"),
    finding("5", 5.0),
]


def test_faults_come_first_then_memory_then_time_and_small_ones_apart():
    shown, minor = rank(FOUND, step_ms=100.0)
    assert [one.kind for one in shown] == ["fault", "memory", "large", "5"]
    assert [one.kind for one in minor] == ["small"]


def test_the_page_and_the_table_show_every_finding_as_text(tmp_path):
    shown, minor = rank(FOUND, step_ms=100.0)
    diagnosis = Diagnosis("cpu", 18, 100.0, {"forward": 60.0, "backward": 40.0}, shown, minor)
    page, data = save_diagnosis(diagnosis, tmp_path)
    text = page.read_text()
    assert text.count("&lt;b&gt;what&lt;/b&gt; &amp; [why]") == len(FOUND)
    assert text.count("<mark>") == len(FOUND)  # each with its source line
    assert [one["kind"] for one in json.loads(data.read_text())["findings"]] == [one.kind for one in shown]
    assert str(diagnosis).count("[why]") == len(shown)
    assert "1 finding below 1% of a step" in str(diagnosis)


def test_the_page_draws_blocks_and_memory_by_category(tmp_path):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)])
    optimizer = torch.optim.Adam(net.parameters())
    with ft.doctor.examine(8, 1, "cpu", out=tmp_path, report=lambda diagnosis: None) as examination:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.ones(16, 64)).sum().backward()
            optimizer.step()
    diagnosis = examination.diagnosis
    assert list(diagnosis.block_ms) == ["0", "1", "2"]
    assert 0 < sum(diagnosis.block_ms.values()) < diagnosis.phase_ms["forward"]
    assert diagnosis.steps == 4  # three were looked at, and the memory of one was recorded
    weights = sum(4 * parameter.numel() for parameter in net.parameters())
    at_peak = json.loads((tmp_path / "doctor.json").read_text())["memory"]["at_peak"]
    assert at_peak["parameters"] == weights
    assert at_peak["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    page = (tmp_path / "doctor.html").read_text()
    assert page.count("<polygon") == 6
    assert page.count("<title>0: ") == 1
    assert not net[0]._forward_pre_hooks
    assert not net[0]._forward_hooks


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_page_opens_in_a_browser_and_its_details_open_with_a_click(tmp_path):
    shown, minor = rank(FOUND, step_ms=100.0)
    diagnosis = Diagnosis("cpu", 18, 100.0, {"forward": 60.0, "backward": 40.0}, shown, minor)
    page, _ = save_diagnosis(diagnosis, tmp_path)
    click = "<script>onload = () => document.querySelector('summary').click()</script>"
    page.write_text(page.read_text() + click)
    headless = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *headless, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert '<details open="">' in seen
    assert seen.count("<rect") == 2
    assert seen.count("<article") == len(FOUND)


def test_costs_by_hand():
    calls = cost_of_calls([0.01, 0.03], steps=4)
    assert calls.value == pytest.approx(10.0)
    assert calls.low < 10.0 < calls.high
    assert cost_of_phase([10.0] * 5, [4.0] * 5).value == pytest.approx(4.0)
    sampled = cost_of_samples(4.0, samples=49)
    assert (sampled.low, sampled.high) == pytest.approx((4 - 4 * 0.28, 4 + 4 * 0.28))


def test_operators_of_a_compiled_model_are_left_alone_and_that_is_stated():
    net = nn.Linear(8, 8)
    net.compile(backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ft.doctor.examine(steps=6, warmup=1, device="cpu", report=lambda diagnosis: None) as examination:
        for _ in range(8):
            optimizer.zero_grad()
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert examination.diagnosis.steps == 5
    assert "The model is compiled" in examination.diagnosis.notes[0]
