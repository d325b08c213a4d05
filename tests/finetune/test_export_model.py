"""``from_pretrained`` reads what ``export_model`` writes, with the same outputs, and the model is not changed."""

import copy
import os

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import export_model, merge_adapters_, quantize_base_, swap_head_
from tests.finetune.test_adapter_files import Holder, trained
from tests.finetune.test_side_by_side import MODELS, SIZE, TEXT, build

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*stay in full precision",
    "ignore:fan_in_fan_out is set to",
    "ignore:`is_gradient_checkpointing` is deprecated",  # PEFT asks for it
)
HALF = torch.bfloat16


@torch.no_grad()
def logits(model, given=TEXT):
    return model.eval()(**given).logits


def stored(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a mapping)


def adapted(model, *more):
    ft.apply(model, [*more, ft.LoRA(rank=2)])
    return trained(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_exported_model_has_the_same_outputs_and_the_original_is_unchanged(name, packed, tmp_path):
    given = MODELS[name][2]
    model = adapted(build(name), *([ft.finetune.QuantizedBase()] if packed else []))
    expected, before = logits(model, given), copy.deepcopy(model.state_dict())
    export_model(model, tmp_path / "model", dtype=torch.float32 if packed else None)
    again, told = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(told.values())  # nothing missing, nothing left over
    assert (logits(again, given) - expected).norm() < 1e-4 * expected.norm()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(logits(model, given), expected)
    assert {p.requires_grad for key, p in model.named_parameters() if "lora_" in key} == {True}
    assert os.listdir(tmp_path) == ["model"]


def test_export_is_bitwise_pefts_merged_model(tmp_path):
    import peft

    model = build("Llama")
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trained(model)
    own = model.state_dict()
    theirs.load_state_dict({f"base_model.model.{key}": value for key, value in own.items()})
    theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = stored(export_model(model, tmp_path / "ours")), stored(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_export_from_a_lightning_module_in_half_precision(tmp_path):
    config = transformers.BertConfig(**SIZE, vocab_size=64, num_labels=3)
    module = Holder(transformers.BertForSequenceClassification(config))
    swap_head_(module.model, 5)
    ft.apply(module, [ft.LoRA(rank=2, targets=["query"], train=["classifier"])])
    trained(module)
    given = {"input_ids": TEXT["input_ids"]}
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        export_model(module, tmp_path / "model", dtype=HALF)
    )
    assert {parameter.dtype for parameter in again.parameters()} == {HALF}
    torch.testing.assert_close(logits(again, given).float(), logits(module.model, given), rtol=0.05, atol=0.05)
    trained_head = module.model.classifier.modules_to_save["default"].weight
    assert torch.equal(again.classifier.weight, trained_head.to(HALF))
    assert not torch.equal(trained_head, module.model.classifier.original_module.weight)


def test_tied_weights_are_written_once_with_generation_settings(tmp_path):
    make = transformers.LlamaForCausalLM
    model = make(make.config_class(**SIZE, vocab_size=64, tie_word_embeddings=True))
    model.generation_config.max_new_tokens = 7
    export_model(adapted(model), tmp_path / "model")
    assert "lm_head.weight" not in stored(tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.generation_config.max_new_tokens == 7
    torch.testing.assert_close(logits(again), logits(model))


def test_export_keeps_merged_adapters_merged(tmp_path):
    model = adapted(build("Llama"))
    plain = export_model(build("Llama"), tmp_path / "plain")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(plain)), logits(build("Llama")))
    merge_adapters_(model)
    expected = logits(model)
    again = transformers.AutoModelForCausalLM.from_pretrained(export_model(model, tmp_path / "model"))
    assert torch.equal(logits(again), expected)
    assert model.model.layers[0].self_attn.q_proj.merged


def test_refused_export_leaves_no_files(tmp_path, monkeypatch):
    packed, target = build("Llama"), tmp_path / "model"
    quantize_base_(packed)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM without dtype=: .* Use for example dtype=torch.bfloat16"):
        export_model(packed, target)
    with pytest.raises(ValueError, match=r"dtype=torch.int8: weights are saved in floats"):
        export_model(packed, target, dtype=torch.int8)
    with pytest.raises(TypeError, match="export_model of a Linear: it holds no Hugging Face model"):
        export_model(nn.Linear(2, 2), target)
    with pytest.raises(ValueError, match=r"several Hugging Face models: 'a', 'b'. Name one: export_model\(model.a"):
        export_model(nn.ModuleDict({"a": build("Llama"), "b": build("Llama")}), target)
    prompted = nn.ModuleDict({"a": build("Llama")})
    ft.finetune.add_prompt_(prompted, peft.PromptTuningConfig(num_virtual_tokens=3))
    for model in (prompted, prompted["a"]):
        with pytest.raises(ValueError, match=r"export_model of a LlamaForCausalLM with virtual tokens: .*save_adapter"):
            export_model(model, target)
    unmergeable = build("Llama")
    ft.finetune.add_adapter_(unmergeable, peft.PolyConfig(r=2, n_tasks=1), "model.layers.0.self_attn.q_proj")
    with pytest.raises(
        TypeError, match=r"merging default into .*q_proj': PEFT cannot merge this kind of adapter. Keep"
    ):
        export_model(unmergeable, target)
    other = build("Llama")
    other.lm_head = nn.Linear(64, 9)
    with pytest.raises(
        ValueError, match=r"'lm_head.bias', 'lm_head.weight' differ from the weights in its configuration"
    ):
        export_model(other, target)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="used: the path already exists and is not overwritten"):
        export_model(other, tmp_path / "used")
    model = adapted(build("Llama"))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export_model(model, target)
    assert os.listdir(tmp_path) == ["used"]
    assert not model.model.layers[0].self_attn.q_proj.merged
