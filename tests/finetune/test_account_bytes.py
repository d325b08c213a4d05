import gc

import pytest
import torch
import transformers
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import account_bytes, quantize_base_
from tests.finetune.test_quantized_stacks import build as mixture
from tests.support.nets import TinyLM

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 90}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, **more))


def gpt2():
    size = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=1, eos_token_id=1))


def conv():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


MODELS = {
    "plain": TinyLM,
    "convolutions": conv,
    "lora": lambda: ft.apply(made := llama(), [ft.LoRA(rank=2, train=["lm_head"])]) and made,
    "nf4": lambda: quantize_base_(made := llama()) and made,
    "qlora": lambda: ft.apply(made := llama(tie_word_embeddings=True), [ft.QLoRA(rank=2)]) and made,
    "int8": lambda: ft.apply(made := gpt2(), [ft.QLoRA(rank=2, kind="int8")]) and made,
    "experts": lambda: ft.apply(made := mixture(), [ft.QLoRA(rank=2)]) and made,
    "half": lambda: llama().bfloat16(),
}


def storages_alive():
    while gc.collect():  # objects freed by one collection may have kept others alive
        pass
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:.*stay in full precision")
def test_total_equals_the_memory_that_the_model_allocates(kind):
    """Compare with all tensors that exist now and did not before, whatever their names and kinds."""
    MODELS[kind]()  # libraries create tables of their own the first time
    before = storages_alive()
    model = MODELS[kind]()
    came = sum(nbytes for storage, nbytes in storages_alive().items() if storage not in before)
    account = account_bytes(model)
    assert account.total == came
    assert account.total == sum(account.by_kind().values())


def test_kinds_of_a_quantised_model():
    model = llama()
    ft.apply(model, [ft.QLoRA(rank=2)])
    account = account_bytes(model)
    expected = {
        "model.embed_tokens.weight": "embeddings",
        "lm_head.weight": "heads",
        "model.layers.0.input_layernorm.weight": "vectors",
        "model.layers.0.mlp.up_proj.base_layer.weight": "4 bits",
        "model.layers.0.mlp.up_proj.base_layer.absmax": "4 bits",
        "model.layers.0.mlp.up_proj.lora_A.default.weight": "adapters",
        "model.rotary_emb.inv_freq": "buffers",
    }
    assert {name: account.kinds[name] for name in expected} == expected
    assert set(account.kinds) >= {name for name, _ in model.named_parameters()}
    assert account.trained == account.by_kind()["adapters"]
    assert account.left == {"lm_head": "a head"}
    assert account.nbytes["model.layers.0.mlp.up_proj.base_layer.weight"] == 64 * 128 // 2


def test_table_lists_every_kind_and_every_reason():
    model = mixture()
    quantize_base_(model, skip=["**.o_proj"])
    text = str(account_bytes(model))
    for words in ("4 bits", "embeddings", "heads", "vectors", "all", "trains", "lm_head: a head"):
        assert words in text
    assert "self_attn.o_proj, model.layers.1.self_attn.o_proj: it was skipped, or added later" in text
    assert "mlp.gate: it is a MixtralTopKRouter" in text


def test_tied_weights_count_once():
    tied, untied = account_bytes(llama(tie_word_embeddings=True)), account_bytes(llama())
    assert untied.total - tied.total == 90 * 64 * 4
    assert "lm_head.weight" not in tied.kinds
