"""Each way to merge into quantised layers does what its name says, and reports its error."""

import copy

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import (
    add_adapter_,
    dequantized_weight,
    merge_adapters_,
    quantize_base_,
    unload_adapters_,
    unmerge_adapters_,
)
from tests.finetune.test_merge import IDS, awake, output, relative
from tests.support.nets import Block, TinyLM, same, weights

KINDS = ("nf4", "fp4", "int8")
VARIANTS = {
    "lora": lambda: ft.LoRA(rank=2),
    "rslora": lambda: ft.LoRA(rank=2, variant="rslora"),
    "dora": lambda: ft.LoRA(rank=2, variant="dora"),
    "ia3": lambda: ft.finetune.IA3(["up", "down"], feedforward=["down"]),
}


class WideLM(TinyLM):
    """Wide enough for PEFT's DoRA, which reads 4-bit weights wrongly with AVX-512 if 64 does not divide rows."""

    def build(self):
        self.embed, self.head = nn.Embedding(17, 64), nn.Linear(64, 17, bias=False)
        self.blocks = nn.ModuleList([Block(64) for _ in range(2)])


def quantised(kind="nf4", variant="lora", **settings):
    """Return a model, its full-precision original, and the original with the same adapter."""
    torch.manual_seed(2)
    model = WideLM() if variant == "dora" else TinyLM()
    original, full = copy.deepcopy(model), copy.deepcopy(model)
    quantize_base_(model, kind, **settings)
    for one in (model, full):
        ft.apply(one, [VARIANTS[variant]()])
    adapters = {name: value for name, value in awake(model).state_dict().items() if "lora_" in name or "ia3_" in name}
    full.load_state_dict(adapters, strict=False)
    return model, original, full


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_merging_into_the_original_is_bitwise_the_full_precision_merge(kind, variant):
    model, original, full = quantised(kind, variant)
    unload_adapters_(model, original=original)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert same(weights(model), weights(unload_adapters_(full)))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_into_the_original_with_rounded_biases_and_bfloat16(dtype):
    original = TinyLM().to(dtype)
    model, full = copy.deepcopy(original), copy.deepcopy(original)
    ft.apply(model, [ft.QLoRA(rank=2, compute_dtype=torch.bfloat16)])
    ft.apply(full, [ft.LoRA(rank=2)])
    adapters = {name: p for name, p in awake(model).named_parameters() if "lora_" in name}
    for name, parameter in full.named_parameters():
        if name in adapters:
            parameter.data = adapters[name].data.clone()  # in float32, as PEFT's own models keep them
    unload_adapters_(model, original=original)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert same(weights(model), weights(unload_adapters_(full)))


def sharded(state, folder):
    import json

    names = list(state)
    for i, part in enumerate((names[:4], names[4:])):
        save_file({name: state[name].contiguous() for name in part}, folder / f"{i}.safetensors")
    index = {name: f"{int(name not in names[:4])}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("form", ["state", "file", "shards", "adapted", "outer", "inner"])
def test_original_may_be_a_module_state_dict_or_file(form, tmp_path):
    model, original, full = quantised()
    state = {name: value.clone() for name, value in original.state_dict().items()}
    save_file(state, tmp_path / "whole.safetensors")
    source = {
        "state": state,
        "file": tmp_path / "whole.safetensors",
        "shards": sharded(state, tmp_path),
        "adapted": full,
        "outer": {f"net.{name}": value for name, value in state.items()},
        "inner": {name.removeprefix("blocks."): value for name, value in state.items()},
    }[form]
    expected = weights(unload_adapters_(copy.deepcopy(full)))
    assert same(weights(unload_adapters_(model, original=source)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_dequantised_merge_equals_the_trained_model(kind, variant):
    model, _, _ = quantised(kind, variant)
    layer = model.blocks[0].up
    before, w = output(model), dequantized_weight(layer.base_layer)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    report = merge_adapters_(model, into="dequantized")
    if variant == "lora":
        torch.testing.assert_close(layer.base_layer.weight, w + product)
    # int8 also quantised the inputs
    assert max(report.against_trained.values()) < (1e-2 if kind == "int8" else 1e-6)
    assert relative(output(model), before) < (1e-2 if kind == "int8" else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_requantised_merge_equals_the_quantised_sum(kind):
    model, _, _ = quantised(kind)
    dense = copy.deepcopy(model)
    merge_adapters_(dense, into="dequantized")
    expected = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    expected[0].weight.data = dense.blocks[0].up.base_layer.weight.data.clone()
    quantize_base_(expected, kind)
    report = merge_adapters_(model, into="requantized")
    base = model.blocks[0].up.base_layer
    assert type(base) is type(expected[0])
    assert torch.equal(dequantized_weight(base), dequantized_weight(expected[0]))
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(9))
    error = relative(base.eval()(x), dense.blocks[0].up.base_layer(x))
    assert report.against_trained["blocks.0.up"] == pytest.approx(error, rel=0.25)
    assert 1e-3 < error < 0.2


@pytest.mark.parametrize("way", ["requantized", "dequantized", "original"])
@pytest.mark.parametrize("kind", KINDS)
def test_unmerging_restores_the_quantised_layers_bitwise(kind, way):
    model, original, _ = quantised(kind)
    before, beside = weights(model), output(model)
    merge_adapters_(model, into=way, original=original if way == "original" else None)
    other = copy.deepcopy(model)
    assert not torch.equal(output(model), beside)
    for one in (other, model):
        unmerge_adapters_(one)
        assert same(weights(one), before)
        assert torch.equal(output(one), beside)


def test_missing_into_lists_the_ways_with_their_cost():
    model, original, _ = quantised()
    before = weights(model)
    for act in (merge_adapters_, unload_adapters_):
        with pytest.raises(ValueError, match="there are several ways") as error:
            act(model)
        for words in ("into='requantized', which rounds", "into='original' with original=", "MiB in float32"):
            assert words in str(error.value)
    for settings, message in [
        ({"into": "original"}, "the original weights are needed"),
        ({"into": "requantized", "original": original}, "it would not be used"),
        ({"into": "best"}, "into='best'"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge_adapters_(model, **settings)
    assert same(weights(model), before)


def test_original_of_another_model_is_refused():
    model, original, _ = quantised()
    before = weights(model)
    state = {name: value.clone() for name, value in original.state_dict().items()}
    lacking = {name: value for name, value in state.items() if "blocks.1.up" not in name}
    other = {**state, "blocks.2.down.weight": torch.randn(8, 16)}
    shape = {**state, "blocks.2.down.weight": torch.randn(4, 16)}
    for source, message in [
        (lacking, "original= lacks blocks.1.up"),
        (other, r"original= for 'blocks.2.down': .* further from the quantised weight than quantising explains"),
        (shape, r"is \[4, 16\] of torch.float32. Pass the weights that were quantised, \[8, 16\]"),
        ({}, "it is empty"),
        (quantised()[0], "original= for 'blocks.0.up'"),
        ("nowhere.safetensors", "there is no such file"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            unload_adapters_(model, original=source)
        assert same(weights(model), before)
        assert not any(layer.merged for layer in model.modules() if isinstance(layer, peft.tuners.lora.LoraLayer))


def test_a_broken_adapter_changes_nothing():
    model, original, _ = quantised()
    model.blocks[2].up.lora_B["default"].weight.data[0, 0] = float("nan")
    before = {name: value.nan_to_num(7) for name, value in weights(model).items()}
    for way in ("requantized", "dequantized", "original"):
        with pytest.raises(ValueError, match=r"merging default into 'blocks.2.up'"):
            merge_adapters_(model, into=way, original=original if way == "original" else None)
        assert same({name: value.nan_to_num(7) for name, value in weights(model).items()}, before)


def test_report_for_the_original_has_both_errors(caplog):
    model, original, full = quantised()
    ids = IDS
    seen = {}
    for name in ("blocks.0.up", "blocks.2.down"):

        def keep(layer, args, out, name=name):
            seen.setdefault(name, (args[0].clone(), out.clone()))

        model.get_submodule(name).register_forward_hook(keep)
    output(model)
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        report = merge_adapters_(model, into="original", original=original, batch=ids)
    for name, (x, trained) in seen.items():
        error = relative(model.get_submodule(name).base_layer(x), trained)
        assert report.against_trained[name] == pytest.approx(error, rel=1e-4)
    assert 0.01 < max(report.against_trained.values()) < 0.3
    assert max(report.against_original.values()) < 1e-6
    assert str(report) in caplog.text
    assert "which is the quantization error; from the unmerged adapter on the original weights by" in str(report)


def llama_in(dtype, folder, **settings):
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    original = LlamaForCausalLM(config).to(dtype)
    original.save_pretrained(folder)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return original, load(folder, quantization_config=quantization, device_map={"": "cpu"}, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["dequantized", "original"])
def test_models_quantised_by_hugging_face_merge_to_the_models_dtype(dtype, way, tmp_path):
    original, model = llama_in(dtype, tmp_path, bnb_4bit_compute_dtype=torch.bfloat16)
    ft.apply(model, [ft.LoRA(rank=4)])
    trained = output(awake(model))
    unload_adapters_(model, into=way, original=tmp_path if way == "original" else None)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    result = output(model)  # this fails in bfloat16 after Hugging Face's own dequantize()
    assert result.dtype == dtype
    assert relative(result, trained) < (0.05 if way == "dequantized" else 0.5)
    assert not hasattr(model, "hf_quantizer")
    model.to(torch.float64)  # Hugging Face refuses this for a quantised model
    model.save_pretrained(tmp_path / "merged")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert torch.equal(output(again), output(model))


def test_in_place_merge_of_quantised_ia3_is_refused():
    model, original, _ = quantised("nf4", "ia3")
    with pytest.raises(TypeError, match=r"Use unload_adapters_\(model, into=...\)"):
        merge_adapters_(model, into="dequantized")
    beside = output(model)
    assert relative(output(unload_adapters_(model, into="dequantized")), beside) < 1e-5


def test_several_adapters_merge_into_layers_with_only_one():
    model = TinyLM()
    quantize_base_(model)
    for name, targets in (("one", ["up"]), ("two", ["up", "down"])):
        ft.apply(model, [ft.LoRA(rank=2, targets=targets, name=name)])
    awake(model)
    ft.finetune.use_adapter_(model, ["one", "two"])
    beside = output(model)
    report = merge_adapters_(model, ["one", "two"], into="dequantized")
    assert len(report.layers) == 6
    assert relative(output(model), beside) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["up", "down"], "exclude_modules": ["down"]},
        {"target_modules": ["up"], "rank_pattern": {"up": 4}},
        {"target_modules": ["up"], "trainable_token_indices": {"embed": [1, 2]}},
    ],
    ids=lambda settings: list(settings)[-1],
)
def test_settings_for_other_layers_do_not_disturb_a_merge(settings):
    model = WideLM()
    quantize_base_(model)
    add_adapter_(model, peft.LoraConfig(r=2, **settings))
    expected = output(awake(model))
    merge_adapters_(model, into="dequantized")
    torch.testing.assert_close(output(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("way", ["requantized", "dequantized", "original"])
@pytest.mark.parametrize("kind", KINDS)
def test_merging_on_cuda_gives_the_same_weights(kind, way):
    model, original, _ = quantised(kind)
    model = model.cuda()
    beside = output(model, IDS.cuda())  # the constants of int8 follow in the first forward
    before = weights(model)
    report = merge_adapters_(model, into=way, original=original if way == "original" else None)
    assert max(report.against_trained.values()) < (0.01 if way == "dequantized" else 0.3)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    unmerge_adapters_(model)
    assert same(weights(model), before)
    assert torch.equal(output(model, IDS.cuda()), beside)
