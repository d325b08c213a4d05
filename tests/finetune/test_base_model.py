"""With its adapters disabled, a model is bitwise the pretrained one, or disabling them is refused."""

import pytest
import torch
from torch.nn import functional as F

import lightning_fasttrain as ft
from tests.finetune.test_merge import IDS, awake
from tests.finetune.test_targets import llama
from tests.support.nets import untied

peft = pytest.importorskip("peft")
KINDS = {
    "lora": peft.LoraConfig(r=2),
    "dora": peft.LoraConfig(r=2, use_dora=True),
    "ia3": peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"]),
    "oft": peft.OFTConfig(r=2, oft_block_size=0, target_modules=["up"]),
}


def chosen_log_probabilities(model):
    return F.log_softmax(model(IDS), -1).gather(-1, IDS[..., None]).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_dpo_reference_log_probabilities_equal_the_pretrained_models(kind, dtype):
    model, untouched = untied().to(dtype), untied().to(dtype)
    ft.finetune.add_adapter_(model, KINDS[kind], train=["head"])
    awake(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    expected = chosen_log_probabilities(untouched).detach()
    for _ in range(2):
        with torch.no_grad(), ft.finetune.base_model(model) as reference:
            assert torch.equal(chosen_log_probabilities(reference), expected)
        optimizer.zero_grad()
        (-F.logsigmoid(chosen_log_probabilities(model) - expected)).mean().backward()
        optimizer.step()
    assert not torch.equal(chosen_log_probabilities(model), expected)
    ft.finetune.enable_adapters_(model, False)
    assert torch.equal(chosen_log_probabilities(model), expected)
    ft.finetune.enable_adapters_(model)
    ft.finetune.unload_adapters_(model, merge=False)
    assert torch.equal(chosen_log_probabilities(model), expected)


CHANGED = {
    "pissa": ({"init_lora_weights": "pissa"}, "its initialization 'pissa' changed"),
    "olora": ({"init_lora_weights": "olora"}, "its initialization 'olora' changed"),
    "all": ({"bias": "all"}, "bias='all' trains the pretrained biases"),
    "lora_only": ({"bias": "lora_only"}, "bias='lora_only' trains the pretrained biases"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_reference_with_changed_weights_is_refused(kind):
    settings, why = CHANGED[kind]
    model = untied()
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2, **settings))
    before = chosen_log_probabilities(model).detach()
    with pytest.raises(ValueError, match=f"(?s){why}.*deepcopy"), ft.finetune.base_model(model):
        pass
    with pytest.raises(ValueError, match=why):
        ft.finetune.enable_adapters_(model, False)
    with pytest.raises(ValueError, match=why):
        ft.finetune.unload_adapters_(model, merge=False)
    ft.finetune.enable_adapters_(model)
    assert torch.equal(chosen_log_probabilities(model), before)
    ft.finetune.unload_adapters_(model)  # keeps what was learnt
    torch.testing.assert_close(chosen_log_probabilities(model), before)


def test_trained_base_parameters_are_named():
    model = llama()
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2))
    model.model.norm.requires_grad_(True)
    with pytest.warns(UserWarning, match="'model.norm.weight' train too"), ft.finetune.base_model(model):
        pass
