"""Trials of single operators: each shape once, counted, and only as long as there is time."""

import pytest
import torch
from torch import nn

from lightning_fasttrain.doctor.findings.operators import _sum_gains
from lightning_fasttrain.doctor.observation.operator_trials import OperatorTrials, Trial, find_changes
from lightning_fasttrain.doctor.observation.operator_watch import OperatorWatch
from lightning_fasttrain.doctor.observation.source_lines import Call


def watch(trials):
    return OperatorWatch(lambda: "forward", trials)


def images(**how):
    return torch.ones(2, 8, 6, 6, **how).requires_grad_()


def test_each_shape_of_a_convolution_is_tried_once_and_counted():
    trials, net = OperatorTrials(budget_s=60.0), nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
    with watch(trials):
        net(images()).sum().backward()
    assert {trial.cure for trial in trials.trials.values()} == {"channels_last"}
    # The last one has another gradient: that of the sum, without strides.
    assert sorted(trial.count for trial in trials.trials.values()) == [1, 2, 3]


def test_channels_last_images_and_single_channels_need_no_trial():
    trials = OperatorTrials(budget_s=60.0)
    with watch(trials):
        nn.Conv2d(8, 8, 3)(images().to(memory_format=torch.channels_last))
        nn.Linear(8, 8)(torch.ones(2, 8))
    assert "channels_last" not in {trial.cure for trial in trials.trials.values()}


def test_float64_is_tried_in_float32_without_changing_the_result():
    trials, x = OperatorTrials(budget_s=60.0), torch.rand(16, 16, dtype=torch.float64)
    with watch(trials):
        product = x @ x
    assert torch.equal(product, x @ x)
    assert [trial.cure for trial in trials.trials.values()] == ["float32"]


def test_without_time_nothing_is_tried_and_that_is_counted():
    trials = OperatorTrials(budget_s=0.0)
    with watch(trials):
        nn.Conv2d(8, 8, 3)(images())
    assert trials.trials == {}
    assert trials.left_out["channels_last"] == 1


def test_the_gain_of_a_step_counts_each_call():
    fast = Trial("channels_last", Call(None), base_ms=3.0, changed_ms=[2.0, 1.0], count=4)
    slow = Trial("channels_last", Call(None), base_ms=1.0, changed_ms=[2.0, 2.0], count=1)
    gain = _sum_gains([fast, slow])
    assert (gain.low, gain.value, gain.high) == pytest.approx((3.0, 5.0, 7.0))


def changes(func, *args):
    return {change.cure: change for change in find_changes(func, args)}


@pytest.mark.parametrize("transposed", [False, True])
def test_padded_sizes_have_the_product_of_the_given_sizes_and_their_layout(transposed):
    hidden, weight = torch.randn(96, 65), torch.randn(65, 131)
    if transposed:
        weight = weight.t().contiguous().t()
    bias = torch.randn(131)
    change = changes(torch.ops.aten.addmm.default, bias, hidden, weight)["padded_sizes"]
    padded = [change.of_tensor(tensor) for tensor in (bias, hidden, weight)]
    assert [tuple(one.shape) for one in padded] == [(192,), (96, 128), (128, 192)]
    assert padded[2].stride(0 if transposed else 1) == 1
    torch.testing.assert_close(torch.addmm(*padded)[:96, :131], torch.addmm(bias, hidden, weight))


def test_sizes_that_are_multiples_of_8_need_no_padding():
    assert "padded_sizes" not in changes(torch.ops.aten.mm.default, torch.ones(72, 64), torch.ones(64, 136))


def test_a_change_that_cannot_run_does_not_stop_the_training(monkeypatch):
    def fail(tensor):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("lightning_fasttrain.doctor.observation.operator_trials._as_float32", fail)
    trials, x = OperatorTrials(budget_s=60.0), torch.rand(16, 16, dtype=torch.float64)
    with watch(trials):
        product = x @ x
    assert torch.equal(product, x @ x)
    assert trials.trials == {}
    assert len(trials.failed) == 1


@pytest.mark.gpu
def test_tf32_is_tried_and_the_setting_restored():
    weight, trials = torch.randn(256, 256, device="cuda"), OperatorTrials(budget_s=60.0)
    before = torch.backends.cuda.matmul.fp32_precision
    with watch(trials):
        torch.mm(weight, weight)
    assert "tf32" in {trial.cure for trial in trials.trials.values()}
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.gpu
def test_the_search_of_cudnn_is_tried_and_the_setting_restored():
    x, trials = torch.randn(2, 3, 32, 32, device="cuda"), OperatorTrials(budget_s=60.0)
    before = torch.backends.cudnn.benchmark
    with watch(trials):
        nn.Conv2d(3, 8, 3).cuda()(x)
    assert "cudnn_benchmark" in {trial.cure for trial in trials.trials.values()}
    assert torch.backends.cudnn.benchmark == before
