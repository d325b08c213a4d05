"""A base quantised by torchao: adapters give the results of the dequantised weights, and files work."""

import copy

import peft
import pytest
import torch
import transformers

from lightning_fasttrain.finetune import (
    account_bytes,
    add_adapter_,
    base_fingerprint,
    export_model,
    load_adapter_,
    merge_adapters_,
    quantize_base_,
    save_adapter,
)
from tests.finetune.test_side_by_side import TEXT, build, step, step_free

torchao = pytest.importorskip("torchao.quantization", reason="the extra 'ao' brings it")
each = pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])


def packed(config):
    model = build("Llama")
    torchao.quantize_(model.model, getattr(torchao, config)())
    return model


def dequantized(model):
    plain = build("Llama")
    for name, parameter in model.named_parameters():
        values = parameter.dequantize() if type(parameter).__module__.startswith("torchao") else parameter
        plain.get_parameter(name).data.copy_(values)
    return plain


def adapted(model):
    torch.manual_seed(0)
    add_adapter_(model, peft.LoraConfig(r=4, init_lora_weights=False))
    return model


@each
def test_loss_and_gradients_equal_those_of_dequantised_weights(config):
    model = packed(config)
    plain = adapted(dequantized(model))
    (loss, grads), (expected, theirs) = step(adapted(model), "Llama"), step(plain, "Llama")
    assert loss == pytest.approx(expected, abs=2e-6)
    assert grads.keys() == theirs.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6)


@each
def test_files_load_on_quantised_and_plain_bases_but_not_on_others(config, tmp_path):
    model = adapted(packed(config))
    save_adapter(model, tmp_path)
    fresh, plain, other = packed(config), dequantized(packed(config)), build("Llama")
    load_adapter_(fresh, tmp_path)
    assert step_free(fresh, "Llama") == step_free(model, "Llama")
    load_adapter_(plain, tmp_path)
    assert step_free(plain, "Llama") == pytest.approx(step_free(model, "Llama"), abs=2e-6)
    other.model.layers[0].mlp.up_proj.weight.data += 1
    torchao.quantize_(other.model, getattr(torchao, config)())
    with pytest.raises(ValueError, match="the values differ in 'model.layers.0.mlp.up_proj.weight'"):
        load_adapter_(other, tmp_path)


@each
def test_torchao_base_is_counted_and_exported_but_not_merged(config, tmp_path):
    model = packed(config)
    assert account_bytes(model).by_kind()["8 bits"] >= sum(
        parameter.numel() for parameter in model.parameters() if type(parameter).__module__.startswith("torchao")
    )
    with pytest.raises(ValueError, match="torchao has quantised it"):
        quantize_base_(copy.deepcopy(model))
    assert any(value.startswith("q") for value in base_fingerprint(model).values())
    with pytest.raises(ValueError, match="without dtype="):
        export_model(model, tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        export_model(model, tmp_path / "model", dtype=torch.float32)
    )
    torch.testing.assert_close(again(**TEXT).logits, model(**TEXT).logits, rtol=1e-4, atol=1e-5)
    adapted(model)
    with pytest.raises(TypeError, match="torchao quantised its weight .* load it into the unquantised model"):
        merge_adapters_(model)
    with pytest.raises(TypeError, match="'pissa' on .*, which is quantised"):
        add_adapter_(packed(config), peft.LoraConfig(init_lora_weights="pissa"))
