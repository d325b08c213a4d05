"""The estimate of a training states what its functions say, and how each value is known."""

import json

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain import estimate
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from tests.support.nets import fit

CONTEXT, LAYERS, WIDTH, HEADS, VOCABULARY = 64, 2, 32, 4, 256
ROWS = 2
BATCH = (torch.zeros(ROWS, CONTEXT, dtype=torch.long), torch.zeros(ROWS, CONTEXT, dtype=torch.long))


def gpt():
    return GPTModule(GPTConfig(VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH))


@pytest.fixture(scope="module")
def on_gpus():
    return estimate.estimate_training(gpt, BATCH, 1e9, gpu="H100:8")


@pytest.fixture(scope="module")
def here():
    return estimate.estimate_training(gpt(), BATCH, 1e6)


def test_time_on_gpus_is_that_of_a_predicted_step(on_gpus):
    speed, flops = on_gpus.speed, on_gpus.flops
    step = ft.predict_time(gpt, BATCH, gpu="H100", devices=8, strategy="ddp")
    assert speed.per_s == pytest.approx(8 * step.tokens_per_second)
    assert speed.mfu_source.startswith(f"predicted under DDP: {step.seconds * 1e3:,.4g} ms/step, ")
    assert speed.hours == pytest.approx(1e9 / speed.per_s / 3600)
    assert speed.device_hours == 8 * speed.hours
    assert speed.energy_kwh == pytest.approx(speed.device_hours * 0.7)
    mfu = estimate.model_flops_utilization(speed.per_s, flops.flops_per_token, 989.4e12, 8)
    assert mfu == pytest.approx(speed.mfu)
    assert on_gpus.steps == 1e9 / (8 * ROWS * CONTEXT)
    assert on_gpus.pf_days == on_gpus.model_flops / 8.64e19


def test_time_here_is_measured(here):
    speed, measured = here.speed, here.measured
    assert speed.mfu_source.startswith("measured here: ")
    assert speed.per_s == pytest.approx(ROWS * CONTEXT / measured.ms * 1e3)
    assert speed.mfu == pytest.approx(here.flops.counted / (measured.ms / 1e3) / measured.peak_flops)
    assert speed.hours == pytest.approx(1e6 / speed.per_s / 3600)


def test_memory_is_predicted_measured_and_by_formula(here):
    nbytes = {what: value for what, (value, _) in here.memory.items()}
    assert nbytes["peak, predicted"] == pytest.approx(nbytes["peak, measured"], rel=0.05)
    assert nbytes["activations, predicted"] == pytest.approx(nbytes["activations, measured"], rel=0.05)
    layers, outside = LAYERS * CONTEXT * ROWS * WIDTH, CONTEXT * ROWS * (5 * WIDTH + 4 * VOCABULARY)
    assert nbytes["activations, formula, recomputation none"] == layers * (34 + 5 * HEADS * CONTEXT / WIDTH) + outside
    assert nbytes["activations, formula, recomputation selective"] == layers * 34 + outside
    assert nbytes["activations, formula, recomputation full"] == layers * 2 + outside


def test_laws_and_batch_are_those_of_the_functions(on_gpus):
    law, parameters = on_gpus.laws[0], on_gpus.flops.parameters
    assert law.loss == estimate.expected_loss(parameters, 1e9)
    assert law.optimal_tokens == estimate.optimal_tokens(parameters)
    assert (law.budget_parameters, law.budget_tokens) == estimate.optimal_allocation(6 * parameters * 1e9)
    assert law.outside.startswith("extrapolated: 35.7e3 parameters")
    assert on_gpus.critical_batch == estimate.critical_batch_tokens(law.loss)
    assert on_gpus.batch_costs == estimate.cost_of_batch_size(8 * ROWS * CONTEXT, on_gpus.critical_batch)


def test_a_measured_noise_scale_is_the_critical_batch_size():
    noise = ft.profiling.GradientNoiseScale(every_n_steps=1)
    varied = tuple(torch.arange(ROWS * CONTEXT).view(ROWS, CONTEXT) for _ in range(2))
    fit(gpt(), [varied, varied], [noise, ft.MicroBatching(2)])
    assert noise.samples is not None
    found = estimate.estimate_training(gpt, BATCH, 1e9, gpu="H100", critical_batch=noise.tokens)
    assert (found.critical_batch, found.critical_source) == (CONTEXT * noise.samples, "measured, as given")
    assert found.batch_costs == pytest.approx((1 + noise.samples / 2, 1 + 2 / noise.samples))


def test_the_report_is_a_table_and_plain_values(on_gpus):
    text = str(on_gpus)
    for words in (
        "35.7k parameters on 1B tokens",
        "8 × H100-SXM",
        "PF-days",
        "predicted under DDP",
        "gpt.blocks.*.up",
    ):
        assert words in text
    values = json.loads(json.dumps(on_gpus.as_dict()))
    assert sum(values["flops_by_part"].values()) == values["flops"]["counted"]
    assert values["speed"]["name"] == "H100-SXM"


def test_a_model_of_images_has_no_scaling_law():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    found = estimate.estimate_training(
        net,
        torch.zeros(4, 3, 8, 8),
        1e6,
        gpu=estimate.Accelerator("Mine", 1e14, 24, 900, None, "its data sheet"),
        mfu=0.5,
        loss=lambda net, images: net(images).mean(),
    )
    assert found.laws == ()
    assert found.critical_batch is None
    assert found.speed.energy_kwh is None
    assert found.speed.hours == pytest.approx(found.flops.counted / 4 * 1e6 / 0.5e14 / 3600)
    assert any("Memory is not predicted: Sequential without optimizer=" in note for note in found.notes)
    assert "samples" in str(found)


def test_peaks_that_a_precision_does_not_reach_are_noted():
    old = estimate.estimate_training(gpt, BATCH, 1e9, gpu="V100", precision="bf16-mixed")
    assert "V100 has no bfloat16" in " ".join(old.notes)
    assert old.speed.mfu == 0.4
    assert "assumed, since time is not predicted" in old.speed.mfu_source
    assert "Korthikanti" in old.speed.mfu_source
    slow = estimate.estimate_training(gpt, BATCH, 1e9, gpu="A100", precision="32-true")
    assert "products of 32-true take at least twice as long" in " ".join(slow.notes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mfu": 0.5}, 'mfu=0.5 without gpu: on this machine it is measured. Add gpu="H100"'),
        ({"gpu": "H100", "mfu": 0.0}, r"mfu=0\.0\): it must be above 0 and at most 1"),
        ({"gpu": "H1000"}, "accelerator 'H1000': it is not in the table"),
        ({"gpu": "H100", "precision": "64-true"}, "precision='64-true'"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        estimate.estimate_training(gpt, BATCH, 1e9, **arguments)
