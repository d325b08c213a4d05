"""Each formula gives the figures of its paper's own tables."""

import pytest

from lightning_fasttrain.estimate import (
    activation_bytes_per_layer,
    cost_of_batch_size,
    critical_batch_tokens,
    energy_kwh,
    input_and_output_bytes,
    kaplan_forward_flops,
    kaplan_loss_of_compute,
    kaplan_parameters,
    megatron_flops,
    megatron_parameters,
    model_flops_utilization,
    palm_flops_per_token,
    pf_days,
    six_n_flops,
    training_hours,
)
from lightning_fasttrain.estimate.flops import Recomputation

# GPT-3, tables 2.1 and D.1: layers, width, parameters in millions, PF-days. The widths of XL and 13B are as trained.
GPT3 = {
    "Small": (12, 768, 125, 2.60),
    "Medium": (24, 1024, 356, 7.42),
    "Large": (24, 1536, 760, 15.8),
    "XL": (24, 2048, 1320, 27.5),
    "2.7B": (32, 2560, 2650, 55.2),
    "6.7B": (32, 4096, 6660, 139),
    "13B": (40, 5120, 12850, 268),
    "175B": (96, 12288, 174600, 3640),
}


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_has_the_parameters_and_pf_days_of_its_table(name):
    layers, width, millions, days = GPT3[name]
    embeddings = (50257 + 2048) * width
    assert (kaplan_parameters(layers, width) + embeddings) / 1e6 == pytest.approx(millions, rel=6e-3)
    assert pf_days(six_n_flops(millions * 1e6, 300e9)) == pytest.approx(days, rel=4e-3)


# Korthikanti et al., tables 3 and 5: layers, width, heads, batch, GPUs, seconds, MFU, hardware FLOPs utilization.
MEGATRON = {
    "22B": (48, 6144, 64, 4, 8, 1.10, 0.415, 0.437),
    "175B": (96, 12288, 96, 64, 64, 13.75, 0.514, 0.528),
    "530B": (105, 20480, 128, 280, 280, 37.83, 0.560, 0.570),
    "1T": (128, 25600, 160, 512, 512, 71.49, 0.563, 0.570),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_has_the_utilization_of_its_table(name):
    layers, width, _, batch, gpus, seconds, mfu, hardware = MEGATRON[name]
    step = (batch, layers, width, 51200, 2048)
    peak = seconds * gpus * 312e12
    # Times have three digits or four.
    assert megatron_flops(*step) / peak == pytest.approx(mfu, abs=2e-3)
    assert megatron_flops(*step, recomputation="selective") / peak == pytest.approx(hardware, abs=2.2e-3)


@pytest.mark.parametrize(("name", "billions"), [("22B", 22), ("175B", 175), ("530B", 530), ("1T", 1008)])
def test_megatron_has_the_parameters_of_its_name(name, billions):
    layers, width, *_ = MEGATRON[name]
    assert megatron_parameters(layers, width, 51200, 2048) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_full_recomputation_is_the_formula_of_narayanan():
    batch, layers, width, vocabulary, context = 64, 96, 12288, 51200, 2048
    expected = 96 * batch * context * layers * width**2
    expected *= 1 + context / (6 * width) + vocabulary / (16 * layers * width)
    assert megatron_flops(batch, layers, width, vocabulary, context, "full") == pytest.approx(expected)


@pytest.mark.parametrize(("name", "term", "saved", "cost"), [("175B", 80, 0.70, 0.027), ("530B", 64, 0.65, 0.016)])
def test_selective_recomputation_saves_and_costs_what_the_paper_states(name, term, saved, cost):
    """Section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG, whose activations shrink by 70% and 65%."""
    layers, width, heads, *_ = MEGATRON[name]
    assert 5 * heads * 2048 / width == pytest.approx(term)
    kept = activation_bytes_per_layer(2048, 1, width, heads, "selective")
    assert 1 - kept / activation_bytes_per_layer(2048, 1, width, heads) == pytest.approx(saved, abs=6e-3)
    step = (1, layers, width, 51200, 2048)
    more = megatron_flops(*step, recomputation="selective") / megatron_flops(*step) - 1
    assert more == pytest.approx(cost, abs=5e-4)


@pytest.mark.parametrize("name", MEGATRON)
def test_activations_are_those_of_table_2(name):
    _, width, heads, *_ = MEGATRON[name]
    unit = 2048 * 4 * width
    attention = 5 * heads * 2048 / width
    expected: dict[tuple[Recomputation, int, bool], float] = {
        ("none", 1, False): 34 + attention,
        ("none", 8, False): 10 + 24 / 8 + attention / 8,
        ("none", 8, True): (34 + attention) / 8,
        ("selective", 8, False): 10 + 24 / 8,
        ("selective", 8, True): 34 / 8,
        ("full", 8, False): 2,
    }
    for (recomputation, parallel, sequence), times in expected.items():
        found = activation_bytes_per_layer(
            *(2048, 4, width, heads), recomputation=recomputation, tensor_parallel=parallel, sequence_parallel=sequence
        )
        assert found / unit == pytest.approx(times)


def test_activations_add_up_over_the_tensors_of_a_layer():
    """Section 4.1, tensor by tensor, two bytes for each element and one for a dropout mask."""
    s, b, h, a = 128, 2, 64, 4
    # The input, queries and keys, values, the input of the output layer, and the mask of its dropout.
    attention = (2 + 4 + 2 + 2 + 1) * s * b * h
    attention += 2 * a * s * s * b + a * s * s * b + 2 * a * s * s * b  # softmax, its mask, its dropout
    mlp = (2 + 8 + 8 + 1) * s * b * h
    assert activation_bytes_per_layer(s, b, h, a) == attention + mlp + 4 * s * b * h
    assert input_and_output_bytes(s, b, h, 1000) == (1 + 2 + 2) * s * b * h + 4 * s * b * 1000


def test_sequences_are_shared_by_devices_that_share_layers():
    with pytest.raises(ValueError, match="sequence_parallel with tensor_parallel=1"):
        activation_bytes_per_layer(8, 1, 8, 1, sequence_parallel=True)


# PaLM, table 3 and appendix B: tokens/s, parameters, layers, heads, head width, peak of a device, devices, MFU.
UTILIZATION = {
    "PaLM": (238.3e3, 540.35e9, 118, 48, 256, 275e12, 6144, 0.462, 0.457),
    "MT-NLG": (65.43e3, 529.6e9, 105, 128, 160, 312e12, 2240, 0.302, 0.297),
}


@pytest.mark.parametrize("name", UTILIZATION)
def test_mfu_is_that_of_the_table_of_palm(name):
    per_s, parameters, layers, heads, width, peak, devices, mfu, without_attention = UTILIZATION[name]
    flops = palm_flops_per_token(parameters, layers, heads, width, 2048)
    assert model_flops_utilization(per_s, flops, peak, devices) == pytest.approx(mfu, abs=6e-4)
    flops = palm_flops_per_token(parameters, 0, heads, width, 2048)
    assert model_flops_utilization(per_s, flops, peak, devices) == pytest.approx(without_attention, abs=6e-4)


def test_kaplans_attention_is_half_of_palms():
    layers, context, width = 48, 1024, 1600
    kaplan = 3 * (kaplan_forward_flops(1e9, layers, context, width) - 2e9)
    palm = palm_flops_per_token(1e9, layers, heads=25, head_width=64, context=context) - 6e9
    assert palm == pytest.approx(2 * kaplan)


def test_hours_are_the_inverse_of_mfu():
    """GPT-3 in section 5.1 of Narayanan et al.: 34 days on 1024 A100 at 140 TFLOP/s, with 8 N D for recomputation."""
    flops = six_n_flops(175e9, 300e9) * 8 / 6
    hours = training_hours(flops, 312e12, 1024, mfu=140 / 312)
    assert hours / 24 == pytest.approx(34, rel=0.01)
    per_s = 300e9 / hours / 3600
    assert model_flops_utilization(per_s, flops / 300e9, 312e12, 1024) == pytest.approx(140 / 312)


def test_energy_is_that_of_gpt3_by_patterson():
    """Table 4 of Patterson et al.: 14.8 days, 10,000 V100, 330 W on average, PUE 1.10: 1,287 MWh."""
    assert energy_kwh(14.8 * 24 * 10000, watts=330, overhead=1.10) / 1000 == pytest.approx(1287, rel=5e-3)


def test_the_critical_batch_size_agrees_with_that_for_a_budget():
    """Table 6 of Kaplan et al.: 2.0e6 C^0.24 tokens, by a fit of its own; equation 1.4 with the loss of the budget."""
    for days in (1e-3, 1.0, 1e2):
        expected = 2.0e6 * days**0.24
        assert critical_batch_tokens(kaplan_loss_of_compute(days)) == pytest.approx(expected, rel=0.1)


def test_steps_and_data_trade_off():
    """Equation 2.7 of McCandlish et al.: (S / S_min - 1) (E / E_min - 1) = 1."""
    for batch in (1, 64, 1e6):
        steps, data = cost_of_batch_size(batch, 1000)
        assert (steps - 1) * (data - 1) == pytest.approx(1)
        assert data == pytest.approx(steps * batch / 1000)  # E = B S, and E_min = B_crit S_min
