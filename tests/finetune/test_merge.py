"""Merging keeps the output, unmerging restores the weights bitwise, and unloading gives a plain model."""

import copy
import pickle

import lightning as L
import peft
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import merge_adapters_, unload_adapters_, unmerge_adapters_
from tests.finetune.test_targets import bert, llama
from tests.support.nets import TinyLM, as_loader, lm_batches, same, trainer, untied, weights

IDS = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(1))


def awake(model):
    """Make adapters and trained module copies change the output."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "ia3_", "modules_to_save")):
            noise = torch.empty(parameter.shape).normal_(std=0.3, generator=generator)
            parameter.data += noise.to(parameter)
    return model


def output(model, ids=IDS):
    with torch.no_grad():
        result = model.eval()(ids)
    return result if torch.is_tensor(result) else result.logits


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


TECHNIQUES = {
    "lora": lambda: ft.LoRA(rank=2),
    "rslora": lambda: ft.LoRA(rank=2, variant="rslora"),
    "dora": lambda: ft.LoRA(rank=2, variant="dora"),
    "pissa": lambda: ft.LoRA(rank=2, variant="pissa"),
    "ia3": lambda: ft.finetune.IA3(["up", "down"], feedforward=["down"]),
    "embedding": lambda: ft.LoRA(rank=2, targets=["embed", "up"]),
    "head": lambda: ft.LoRA(rank=2, train=["head"]),
}


EXACT = [(kind, torch.float32, 1e-5) for kind in TECHNIQUES]
ROUNDED = [(kind, torch.bfloat16, 1e-2) for kind in TECHNIQUES if kind != "pissa"]  # PiSSA needs float32


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), EXACT + ROUNDED)
def test_merged_equals_unmerged_and_unmerging_is_bitwise(kind, dtype, tolerance):
    model = untied().to(dtype)
    ft.apply(model, [TECHNIQUES[kind]()])
    before, beside = weights(awake(model)), output(model)
    report = merge_adapters_(model)
    assert report.names == ("default",)
    assert report.layers
    assert not same(weights(model), before)  # something was merged
    assert relative(output(model), beside) < tolerance
    unmerge_adapters_(model)
    assert same(weights(model), before)
    assert torch.equal(output(model), beside)


def test_convolutions_and_attention_merge():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.attention, self.end = nn.Conv1d(8, 8, 3), nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

        def forward(self, x):
            x = self.conv(x.mT).mT
            return self.end(self.attention(x, x, x)[0])

    model, x = Net(), torch.randn(4, 6, 8)
    ft.apply(model, [ft.LoRA(rank=2, targets=["conv", "attention"])])
    beside, before = output(awake(model), x), weights(model)
    merge_adapters_(model)
    assert relative(output(model, x), beside) < 1e-5
    unmerge_adapters_(model)
    assert same(weights(model), before)
    plain = unload_adapters_(model)
    assert relative(output(plain, x), beside) < 1e-5
    assert [type(m) for m in plain.modules()] == [type(m) for m in Net().modules()]
    assert list(plain.state_dict()) == list(Net().state_dict())


def test_merged_weight_equals_the_formula_of_the_paper():
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2, alpha=6, targets="blocks.0.up")])
    layer = awake(model).blocks[0].up
    a, b, w = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer.weight.clone()
    merge_adapters_(model)
    torch.testing.assert_close(layer.base_layer.weight, w + 6 / 2 * b @ a)


def two_adapters(**settings):
    model = untied()
    for name, targets in (("one", ["up"]), ("two", ["up", "down"])):
        ft.apply(model, [ft.LoRA(rank=2, targets=targets, name=name, **settings)])
    return awake(model)


@pytest.mark.parametrize("names", ["one", "two", ["one", "two"]])
def test_several_adapters_merge_by_name(names):
    model = two_adapters()
    ft.finetune.use_adapter_(model, names)
    beside, before = output(model), weights(model)
    ft.finetune.use_adapter_(model, "two")
    report = merge_adapters_(model, names)
    assert relative(output(model), beside) < 1e-5
    assert len(report.layers) == (3 if names == "one" else 6)
    unmerge_adapters_(model)
    assert same(weights(model), before)
    assert torch.equal(output(model), beside)  # the merged adapters are active
    assert relative(output(unload_adapters_(model, names=names)), beside) < 1e-5


def test_merging_twice_and_unmerging_an_unmerged_model_are_refused():
    model = TinyLM()
    with pytest.raises(ValueError, match="TinyLM has no adapter"):
        merge_adapters_(model)
    ft.apply(model, [ft.LoRA(rank=2)])
    with pytest.raises(ValueError, match="no adapter is merged"):
        unmerge_adapters_(awake(model))
    merge_adapters_(model)
    once = weights(model)
    with pytest.raises(ValueError, match="merging: adapter default is already merged into the weights"):
        merge_adapters_(model)
    assert same(weights(model), once)
    unmerge_adapters_(model)
    with pytest.raises(
        ValueError, match="adapter 'other': the model has no adapter of this name. Existing adapters: default"
    ):
        merge_adapters_(model, "other")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_adapter_changes_nothing(broken):
    model = two_adapters()
    model.blocks[2].up.lora_B["one"].weight.data[0, 0] = broken
    before, trained = weights(model), [p.requires_grad for p in model.parameters()]
    for act in (merge_adapters_, lambda model, name: unload_adapters_(model, names=name)):
        with pytest.raises(ValueError, match=r"merging one into 'blocks.2.up': .* infinite or NaN"):
            act(model, "one")
        after = weights(model)
        assert all(torch.equal(after[key].nan_to_num(7), before[key].nan_to_num(7)) for key in before)
        assert [p.requires_grad for p in model.parameters()] == trained
        assert model.blocks[0].up.active_adapters == ["two"]
        assert not any(layer.merged for layer in model.modules() if isinstance(layer, peft.tuners.lora.LoraLayer))


def test_merged_adapter_does_not_train():
    model = untied()
    ft.apply(model, [ft.LoRA(rank=2, train=["head"])])
    trained = [name for name, p in awake(model).named_parameters() if p.requires_grad]
    merge_adapters_(model)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(
        ValueError, match=r"adding adapter 'default': adapter default is already merged .* Call unmerge_adapters_"
    ):
        trainer([ft.LoRA(rank=2, train=["head"])]).fit(model, as_loader(lm_batches(2)))
    unmerge_adapters_(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    trainer([ft.LoRA(rank=2, train=["head"])]).fit(model, as_loader(lm_batches(2)))


def test_switching_adapters_is_refused_while_merged():
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2)])
    merge_adapters_(model)
    for act in (lambda: ft.finetune.use_adapter_(model, "default"), lambda: ft.finetune.enable_adapters_(model, False)):
        with pytest.raises(ValueError, match="default is already merged into the weights"):
            act()
    with pytest.raises(ValueError, match="default is already merged"), ft.finetune.base_model(model):
        pass
    unmerge_adapters_(model)
    ft.finetune.enable_adapters_(model, False)
    with pytest.raises(ValueError, match="adapters are disabled"):
        merge_adapters_(model)


def test_keys_stay_and_copies_unmerge_independently():
    model = TinyLM().bfloat16()
    ft.apply(model, [ft.LoRA(rank=2)])
    before = weights(awake(model))
    merge_adapters_(model)
    merged = weights(model)
    assert list(merged) == list(before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        unmerge_adapters_(other)
        assert same(weights(other), before)
        assert same(weights(model), merged)
    unmerge_adapters_(model.float())  # cast while merged: the originals are cast too
    assert all(torch.equal(value, before[name].float()) for name, value in weights(model).items())


def test_adapters_merged_by_peft_cannot_be_unmerged():
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2, targets="blocks.0.up")])
    model.blocks[0].up.merge()
    with pytest.raises(ValueError, match="PEFT merged it"):
        unmerge_adapters_(model)


@pytest.mark.parametrize("make", [untied, llama, bert])
@pytest.mark.parametrize("merge", [True, False])
def test_unloaded_model_can_be_adapted_again(make, merge):
    model = make()
    head = {"llama": "lm_head", "bert": "classifier"}.get(make.__name__, "head")
    attributes, parts = set(vars(model)), [type(m) for m in model.modules()]
    before, base = weights(model), output(model)
    ft.apply(model, [ft.LoRA(rank=2, train=[head])])
    beside = output(awake(model))
    assert unload_adapters_(model, merge) is model
    assert set(vars(model)) == attributes
    assert [type(m) for m in model.modules()] == parts
    assert list(model.state_dict()) == list(before)
    assert all(p.requires_grad for p in model.parameters())
    if merge:
        assert relative(output(model), beside) < 1e-5
        assert not torch.equal(weights(model)[f"{head}.weight"], before[f"{head}.weight"])
    else:
        assert same(weights(model), before)
        assert torch.equal(output(model), base)
    ft.apply(model, [ft.LoRA(rank=1, targets=[head])])
    assert [name for name, p in model.named_parameters() if p.requires_grad and head not in name] == []


def test_unloading_keeps_merged_adapters_and_drops_others():
    model = TinyLM()
    before = weights(model)
    ft.apply(model, [ft.LoRA(rank=2)])
    beside = output(awake(model))
    merge_adapters_(model)
    other = copy.deepcopy(model)
    assert same(weights(unload_adapters_(other, merge=False)), before)
    with pytest.raises(ValueError, match="the adapters are merged already, so names="):
        unload_adapters_(model, names="default")
    assert relative(output(unload_adapters_(model)), beside) < 1e-5


def test_inner_model_is_unloaded_with_its_statistics():
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.norm = llama(), nn.BatchNorm1d(4)

        def forward(self, ids):
            return self.model(ids).logits

    module = Module()
    before = list(module.state_dict())
    ft.apply(module, [ft.LoRA(rank=2)])
    beside = output(awake(module))
    assert relative(output(unload_adapters_(module)), beside) < 1e-5
    assert not hasattr(module.model, "peft_config")
    assert list(module.state_dict()) == before
    assert module.train().norm.training


def test_unloading_pissa_without_merging_is_refused():
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2, variant="pissa")])
    with pytest.raises(ValueError, match="its initialization 'pissa' changed the pretrained weights"):
        unload_adapters_(model, merge=False)


def test_two_heads_cannot_both_be_merged():
    model = two_adapters(train=["head"])
    with pytest.raises(ValueError, match="'head' is fully trained in one and two: only one"):
        merge_adapters_(model, ["one", "two"])


def test_into_without_quantised_layers_is_refused():
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2)])
    with pytest.raises(ValueError, match="into='requantized': no adapted layer is quantised"):
        merge_adapters_(model, into="requantized")
    with pytest.raises(ValueError, match="into='whatever'"):
        merge_adapters_(model, into="whatever")
