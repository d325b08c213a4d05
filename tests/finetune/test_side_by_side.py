"""Current kinds of models against PEFT and bitsandbytes: equal losses and gradients, and compatible files.

The table in ``examples/results/README.md`` must list the rows here.
"""

from pathlib import Path

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers

import lightning_fasttrain as ft
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.finetune import find_targets, load_adapter_, quantize_base_, save_adapter, unload_adapters_

RESULTS = (Path(__file__).parent.parent.parent / "examples" / "results" / "README.md").read_text()
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(24).view(2, 12) + 3
TEXT = {"input_ids": IDS, "labels": IDS}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64, "bos_token_id": 1}
T5 = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
WHISPER = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 4, "vocab_size": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
    **{"max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0, "decoder_start_token_id": 1},
}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 64}

# model → its class, its configuration, and a batch
MODELS = {
    "Llama": ("LlamaForCausalLM", {**SIZE, "vocab_size": 64}, TEXT),
    "GPT-2": ("GPT2LMHeadModel", {**GPT2, "eos_token_id": 1}, TEXT),
    "T5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, TEXT),
    "Mixtral": ("MixtralForCausalLM", {**SIZE, **EXPERTS}, TEXT),
    "ViT": (
        "ViTForImageClassification",
        {**SIZE, "image_size": 32, "patch_size": 8},
        {"pixel_values": torch.ones(2, 3, 32, 32).cumsum(-1) / 32, "labels": torch.tensor([0, 1])},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        WHISPER,
        {"input_features": torch.ones(2, 4, 16).cumsum(-1) / 16, "labels": IDS},
    ),
}
each = pytest.mark.parametrize("name", MODELS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:.*stay in full precision"),
]


def build(name):
    kind, settings, _ = MODELS[name]
    make = getattr(transformers, kind)
    torch.manual_seed(0)
    return make(make.config_class(**settings)).eval()  # dropout would draw other masks


def step(model, name):
    model.zero_grad()
    loss = model(**MODELS[name][2]).loss
    loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return loss.item(), {key.removeprefix("base_model.model."): grad for key, grad in grads.items()}


def by_hand(model):
    """Replace each linear layer, except heads and those kept in float32, by a bitsandbytes layer in nf4."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for place in find_targets(model):
        layer, (parent, _, last) = model.get_submodule(place), place.rpartition(".")
        if last in kept or place in find_heads(model):
            continue
        weight = layer.weight.detach().T.contiguous() if hasattr(layer, "nf") else layer.weight.detach()
        out_features, in_features = weight.shape
        packed = bnb.nn.Linear4bit(in_features, out_features, layer.bias is not None, torch.float32, quant_type="nf4")
        packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        packed.bias = layer.bias
        setattr(model.get_submodule(parent), last, packed.to("cpu"))
    return model


def adapted(name, prepare):
    """Return this package's model and PEFT's, with equal weights that no initialization produces."""
    ours, theirs = prepare(build(name)), prepare(build(name))
    names = ft.finetune.add_adapter_(ours, peft.LoraConfig(r=4))
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules=list(names)))
    generator = torch.Generator().manual_seed(1)
    for key, parameter in ours.named_parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05, generator=generator)
            theirs.get_parameter(f"base_model.model.{key}").data.copy_(parameter.data)
    return ours.eval(), theirs.eval()


@each
def test_lora_is_bitwise_pefts(name):
    ours, theirs = adapted(name, lambda model: model)
    (loss, grads), (expected, their_grads) = step(ours, name), step(theirs, name)
    assert loss == expected
    assert grads
    assert set(grads) == set(their_grads)
    assert all(torch.equal(grads[key], their_grads[key]) for key in grads)


@each
def test_four_bit_layers_equal_bitsandbytes_layers(name):
    """Only the layers are in train mode: in eval the reference layers would repack themselves on some processors."""
    ours, expected = build(name), by_hand(build(name))
    stacks = [key for key, parameter in ours.named_parameters() if parameter.ndim == 3 and parameter.shape[0] > 1]
    quantize_base_(ours, skip=["**.experts"] if any("experts" in key for key in stacks) else ())
    layers = [place for place, layer in expected.named_modules() if isinstance(layer, bnb.nn.Linear4bit)]
    assert layers
    for place in layers:
        one, other = ours.get_submodule(place), expected.get_submodule(place).train()
        x = torch.randn(3, one.in_features)
        assert torch.equal(one(x), other(x)), place


@each
@pytest.mark.parametrize("prepare", [lambda model: model, lambda model: quantize_base_(model) and model])
def test_files_are_compatible_and_merging_keeps_the_loss(name, prepare, tmp_path):
    ours, _ = adapted(name, prepare)
    expected = step(ours, name)[0]
    save_adapter(ours, tmp_path / "adapter")
    fresh = prepare(build(name))
    load_adapter_(fresh, tmp_path / "adapter")
    assert step_free(fresh, name) == pytest.approx(expected, abs=1e-6)
    theirs = peft.PeftModel.from_pretrained(prepare(build(name)), tmp_path / "adapter")
    assert step_free(theirs.eval(), name) == pytest.approx(expected, abs=1e-6)
    quantized = any(
        isinstance(module, bnb.nn.Linear4bit) for module in ours.modules() if not hasattr(module, "stands_for")
    )
    plain = unload_adapters_(ours, **({"into": "dequantized"} if quantized else {}))
    assert step_free(plain, name) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def step_free(model, name):
    return model(**MODELS[name][2]).loss.item()


def test_results_table_lists_these_models():
    written = RESULTS.split("<!-- what works -->\n")[1].split("\n<!-- /what works -->")[0].splitlines()[2:]
    assert [line.split("|")[1].strip().split(" (")[0] for line in written] == list(MODELS)
