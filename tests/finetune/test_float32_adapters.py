"""Adapters train in float32 on a low-precision base, however they were created, as PEFT's own do."""

import copy

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from tests.finetune.test_merge import awake
from tests.finetune.test_targets import llama
from tests.support.nets import as_loader, fit, lm_batches, trainer, untied

peft = pytest.importorskip("peft")
IDS = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(1))
KINDS = {
    "lora": lambda: ft.LoRA(rank=2),
    "dora": lambda: ft.LoRA(rank=2, variant="dora"),
    "ia3": lambda: ft.finetune.IA3(["up"]),
    "embedding": lambda: ft.LoRA(rank=2, targets=["up", "embed"]),
    "qlora": lambda: ft.QLoRA(rank=2, skip="head"),
}


def trained(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def dtypes(module):
    return {p.dtype for p in trained(module).values()}


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_change_every_adapter_weight_in_a_bf16_run(kind):
    module = untied(lr=1e-4, weight_decay=0.0)
    ft.apply(module, [KINDS[kind]()])
    before = {name: p.detach().clone() for name, p in trained(awake(module)).items()}
    module = fit(module, lm_batches(8), [KINDS[kind]()], precision="bf16-true")
    assert dtypes(module) == {torch.float32}
    assert module.blocks[0].norm.weight.dtype == torch.bfloat16
    for name, parameter in trained(module).items():
        moved = parameter.detach() != before[name]
        if "embedding_A" in name:  # tokens that do not occur have no gradient
            continue
        assert moved.float().mean() > 0.99, name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_forward_on_a_bf16_base_equals_pefts(settings):
    base = llama().bfloat16()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **settings)
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    ours = base
    ft.finetune.add_adapter_(ours, config)
    awake(ours)
    for parameter, value in zip(theirs.parameters(), ours.parameters(), strict=True):
        parameter.data.copy_(value)
    assert dtypes(ours) == dtypes(theirs) == {torch.float32}
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    assert ours(IDS).logits.dtype == torch.bfloat16


def test_moving_and_casting_the_model_does_not_round_adapters():
    module = untied()
    ft.apply(module, [ft.LoRA(rank=2)])
    before = {name: p.detach().clone() for name, p in trained(awake(module)).items()}
    other = copy.deepcopy(module)
    fabric = L.Fabric(accelerator="cpu", precision="bf16-true")
    for moved in (module.to(torch.bfloat16), module.half(), fabric.setup(other).module):
        assert moved.blocks[0].norm.weight.dtype != torch.float32
        assert all(torch.equal(p, before[name]) for name, p in trained(moved).items())
    assert {p.dtype for p in trained(module.double()).values()} == {torch.float64}  # this conversion loses nothing


def test_loaded_adapter_keeps_its_values_on_a_bf16_base(tmp_path):
    first, second = untied(), untied().bfloat16()
    ft.apply(first, [ft.LoRA(rank=2)])
    folder = ft.finetune.save_adapter(awake(first), tmp_path / "adapter")
    ft.finetune.load_adapter_(second, folder, trainable=True)
    stored = dict(trained(first))
    assert all(torch.equal(p, stored[name]) for name, p in trained(second).items())
    assert trained(second).keys() == stored.keys()


def test_resumed_bf16_run_has_the_same_float32_adapters(tmp_path):
    path = tmp_path / "run.ckpt"
    module, t = untied(), trainer([ft.LoRA(rank=2)], precision="bf16-true", max_steps=2)
    t.fit(module, as_loader(lm_batches(4)))
    t.save_checkpoint(path)
    again = untied()
    trainer([ft.LoRA(rank=2)], precision="bf16-true", max_steps=2).fit(again, as_loader(lm_batches(4)), ckpt_path=path)
    assert dtypes(again) == {torch.float32}
    assert all(torch.equal(p, trained(module)[name]) for name, p in trained(again).items())


def test_virtual_tokens_stay_in_float32_too():
    model = torch.nn.ModuleDict({"lm": llama()})
    ft.finetune.add_prompt_(model, peft.PromptTuningConfig(num_virtual_tokens=3))
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    assert model.bfloat16()["lm"](IDS).logits.dtype == torch.bfloat16
    assert all(torch.equal(p, before[name]) for name, p in trained(model).items())
