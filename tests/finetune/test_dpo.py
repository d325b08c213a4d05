"""The DPO example: its loss equals a manual computation with a copy of the model as the reference."""

import copy
import importlib
import re

import pytest
import torch

import lightning_fasttrain as ft
from tests.support.run_example import ROOT, last_line


@pytest.fixture
def dpo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("dpo")


def log_probability_by_hand(model, tokens, prompt):
    logits = model(input_ids=tokens).logits.log_softmax(-1)
    found = []
    for row in range(len(tokens)):
        terms = [logits[row, place - 1, tokens[row, place]] for place in range(prompt, tokens.shape[1])]
        found.append(torch.stack(terms).sum())
    return torch.stack(found)


def test_loss_and_gradients_equal_a_manual_computation(dpo):
    torch.manual_seed(0)
    model = dpo.LlamaForCausalLM(dpo.CONFIG).eval()
    reference = copy.deepcopy(model)
    module = dpo.DPO(model, beta=0.3)
    ft.apply(model, [ft.LoRA(rank=4, targets=["q_proj", "down_proj"])])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    chosen, rejected = torch.randint(256, (2, 3, dpo.PROMPT + dpo.ANSWER))
    module.log = lambda *_: None
    loss = module.training_step((chosen, rejected), 0)
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trains)

    ours = [log_probability_by_hand(model, tokens, dpo.PROMPT) for tokens in (chosen, rejected)]
    with torch.no_grad():
        theirs = [log_probability_by_hand(reference, tokens, dpo.PROMPT) for tokens in (chosen, rejected)]
    ratio = (ours[0] - ours[1]) - (theirs[0] - theirs[1])
    by_hand = -torch.log(1 / (1 + torch.exp(-0.3 * ratio))).mean()
    assert ratio.abs().min() > 1e-3  # the adapter changes the output
    torch.testing.assert_close(loss, by_hand, rtol=1e-5, atol=1e-5)
    for found, expected in zip(gradients, torch.autograd.grad(by_hand, trains), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_new_adapter_has_the_preferences_of_the_reference(dpo):
    module = dpo.DPO(dpo.LlamaForCausalLM(dpo.CONFIG).eval())
    ft.apply(module.model, [ft.LoRA(rank=4)])
    chosen, rejected = torch.randint(256, (2, 2, dpo.PROMPT + dpo.ANSWER))
    assert torch.equal(module.margins(chosen, rejected), torch.zeros(2))


@pytest.mark.slow
def test_training_learns_the_preference():
    said = last_line("dpo.py", "--steps", "8")
    assert int(re.search(r"(\d+)% of 64 pairs", said)[1]) > 60, said
