"""The memory that an adapter saves equals the prediction."""

import lightning as L
import pytest
import torch
import transformers

import lightning_fasttrain as ft
from tests.memory.test_predict_memory import SMALL, measured
from tests.support.nets import as_loader, trainer


@pytest.mark.parametrize(("name", "checkpointing"), [("gpt", False), ("llama", True), ("encoder", True)])
def test_the_peak_with_an_adapter_is_predicted_within_five_per_cent(name, checkpointing):
    specimen = SMALL[name]
    techniques = [ft.LoRA(rank=8), *([ft.ActivationCheckpointing()] if checkpointing else [])]
    report = ft.predict_memory(specimen.module, specimen.batch(), techniques=techniques, device="cpu")
    assert measured(specimen, techniques) == pytest.approx(report.peak_bytes, rel=0.05)


class Half(L.LightningModule):
    """A model so wide that an adapter's weights, gradients and states dominate the step's memory."""

    def __init__(self):
        super().__init__()
        size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, vocab_size=200))

    def training_step(self, batch, _):
        return self.lm(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad])


def test_float32_adapters_on_a_half_precision_base_are_predicted():
    ids = torch.arange(32).view(2, 16)
    batch, meter = {"input_ids": ids, "labels": ids}, ft.MemoryMeter()
    report = ft.predict_memory(Half, batch, techniques=[ft.LoRA(rank=64)], precision="bf16-true", device="cpu")
    trainer([ft.LoRA(rank=64), meter], precision="bf16-true").fit(Half(), as_loader([batch] * 3))
    assert report.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.05)


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
