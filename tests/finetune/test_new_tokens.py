"""New tokens: rows of an embedding that train with an adapter, also if the head is tied to it."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import add_adapter_, base_model, load_adapter_, save_adapter, trained_names

NEW = [98, 99]
tied = pytest.mark.parametrize("tie", [False, True])


def llama(tie=False, vocabulary=100):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**size, vocab_size=vocabulary, tie_word_embeddings=tie)
    return transformers.LlamaForCausalLM(config)


def loss_of(model):
    ids = torch.arange(84, 100).view(2, 8)
    return model(input_ids=ids, labels=ids).loss


def trained(tie, rows=NEW):
    """Train a few steps, so that all trainable parameters have changed."""
    model = llama(tie)
    add_adapter_(model, peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=rows))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@tied
def test_only_the_new_rows_and_the_adapter_train(tie):
    model, plain = trained(tie), llama(tie)
    assert loss_of(model) < loss_of(plain) - 0.05
    names = trained_names(model)
    rows = [name for name in names if name.endswith("trainable_tokens_delta.default")]
    assert len(rows) == 1 + tie  # also of the head, if it is tied
    assert len(names) == len(rows) + 2 * 2
    base = model.get_input_embeddings().token_adapter.base_layer.weight
    assert torch.equal(base, plain.get_input_embeddings().weight)


@tied
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
@pytest.mark.parametrize("rows", [NEW, {"embed_tokens": [97, 98, 99]}])
def test_files_are_compatible_with_peft(tie, rows, tmp_path):
    model = trained(tie, rows)
    expected = loss_of(model)
    save_adapter(model, tmp_path / "ours")
    fresh = llama(tie)
    load_adapter_(fresh, tmp_path / "ours")
    assert torch.equal(loss_of(fresh), expected)
    assert not any(parameter.requires_grad for parameter in fresh.parameters())
    theirs = peft.PeftModel.from_pretrained(llama(tie), tmp_path / "ours")
    assert torch.equal(loss_of(theirs), expected)
    theirs.save_pretrained(tmp_path / "theirs")
    again = llama(tie)
    load_adapter_(again, tmp_path / "theirs", trainable=True)
    assert torch.equal(loss_of(again), expected)
    assert sum(parameter.requires_grad for parameter in again.parameters()) == 1 + 2 * 2


@tied
def test_new_tokens_can_be_merged_unmerged_and_disabled(tie):
    model, plain = trained(tie), llama(tie)
    expected = loss_of(model)
    ft.finetune.merge_adapters_(model)
    torch.testing.assert_close(loss_of(model), expected)
    ft.finetune.unmerge_adapters_(model)
    assert torch.equal(loss_of(model), expected)
    with base_model(model):
        assert torch.equal(loss_of(model), loss_of(plain))
    ft.finetune.unload_adapters_(model)
    torch.testing.assert_close(loss_of(model), expected)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tie
    assert list(model.state_dict()) == list(plain.state_dict())


def test_base_without_the_new_tokens_is_refused(tmp_path):
    save_adapter(trained(False), tmp_path / "adapter")
    smaller = llama(vocabulary=98)
    before = [type(module) for module in smaller.modules()]
    with pytest.raises(ValueError, match=r"trained rows '98', '99' of 'model.embed_tokens', which has 98"):
        load_adapter_(smaller, tmp_path / "adapter", check_base=False)
    assert [type(module) for module in smaller.modules()] == before


def test_file_with_rows_that_differ_from_its_settings_is_refused(tmp_path):
    folder = save_adapter(trained(False), tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "token_adapter" in name)
    save_file({**tensors, name: torch.zeros(3, 32)}, file)
    with pytest.raises(ValueError, match="and holds 3"):
        load_adapter_(llama(), folder)
