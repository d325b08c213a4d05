"""What an adapter saves is what was predicted."""

import pytest

import lightning_fasttrain as ft
from tests.plan.test_predict_memory import SMALL, measured


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama", "encoder"])
def test_the_peak_with_an_adapter_is_predicted_within_five_per_cent(name, checkpointing):
    specimen = SMALL[name]
    techniques = [ft.LoRA(rank=8), *([ft.ActivationCheckpointing()] if checkpointing else [])]
    report = ft.predict_memory(specimen.module, specimen.batch(), techniques=techniques, device="cpu")
    assert measured(specimen, techniques) == pytest.approx(report.peak_bytes, rel=0.05)


def test_gradients_and_optimizer_states_shrink_to_the_adapters():
    specimen = SMALL["llama"]
    whole = ft.predict_memory(specimen.module, specimen.batch(), device="cpu")
    adapter = ft.predict_memory(specimen.module, specimen.batch(), techniques=[ft.LoRA(rank=8)], device="cpu")
    module = specimen.module()
    ft.apply(module, [ft.LoRA(rank=8)])
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    assert adapter.peaks["gradients"] == trained
    assert adapter.peaks["optimizer state"] == pytest.approx(2 * trained, rel=0.01)
    assert whole.peaks["gradients"] > 10 * trained
