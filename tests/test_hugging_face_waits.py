"""A training step of a Hugging Face model on a GPU: no wait for the device for masks, positions, lengths and counts."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import lightning_fasttrain as ft
from tests.support.device_calls import STAND_IN, DeviceCalls

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Total length of")]

STEP = 6  # by then every cache is warm
ROWS, LENGTH = 8, 16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "attention_dropout": 0.0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "gpt2 without cache": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, use_cache=False)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
        )
    ),
}


def micro():
    # Without a trial: a simulated driver computes nothing that a trial could compare.
    return ft.MicroBatching(4, count="targets", check=False)


TECHNIQUES = {
    "DevicePrefetch": lambda: [ft.DevicePrefetch()],
    "MicroBatching": lambda: [micro()],
    "both": lambda: [ft.DevicePrefetch(), micro()],
    "ActivationCheckpointing": lambda: [ft.ActivationCheckpointing(), ft.DevicePrefetch(), micro()],
}


class Tuned(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


def batch_of(name, mask):
    if name == "vit":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.zeros(ROWS, dtype=torch.long)}
    ids = torch.randint(1, 64, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if mask != "no mask":
        batch["attention_mask"] = torch.ones_like(ids)
    if mask == "padded":
        batch["attention_mask"][::2, 12:] = 0
        batch["labels"][::2, 12:] = -100
    return batch


def run_to_counted_step(model, batches, techniques):
    calls = DeviceCalls(STEP)
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        max_steps=STEP + 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, calls],
    )
    trainer.fit(Tuned(model.train()), DataLoader(batches, batch_size=None))
    assert calls.launches > 0


@pytest.fixture(autouse=True)
def without_cudnn(monkeypatch):
    torch.backends.cuda.enable_cudnn_sdp(False)  # put back by fixtures.py
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)


@pytest.mark.parametrize("techniques", TECHNIQUES)
@pytest.mark.parametrize("mask", ["no mask", "all ones", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_hugging_face_model_waits_for_nothing(name, mask, techniques):
    if name == "vit" and mask != "no mask":
        pytest.skip("images have no mask")
    if STAND_IN and name == "t5" and techniques == "ActivationCheckpointing":
        pytest.skip("norms of weights, which show whether a forward writes to them, are those of no values")
    batches = [batch_of(name, mask) for _ in range(STEP + 3)]
    pinned = [{key: value.pin_memory() for key, value in batch.items()} for batch in batches]
    run_to_counted_step(MODELS[name](), pinned, TECHNIQUES[techniques]())  # a wait is an error
