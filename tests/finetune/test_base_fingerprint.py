"""The base fingerprint identifies a base in any precision, with or without an adapter, and detects other ones."""

import copy
import re

import pytest
import torch
from torch import nn

from lightning_fasttrain.finetune import add_adapter_, base_fingerprint, merge_adapters_
from lightning_fasttrain.finetune.selection.base_fingerprint import refuse_other_base
from tests.finetune.test_targets import bert
from tests.support.nets import TinyLM

peft = pytest.importorskip("peft")


def test_fingerprint_covers_all_parameters_and_ignores_precision():
    model = TinyLM()
    found = base_fingerprint(model)
    assert list(found) == sorted(name for name, _ in model.named_parameters())
    assert all(re.fullmatch("[0-9a-f]{12}", value) for value in found.values())
    for other in (TinyLM(), TinyLM().bfloat16(), TinyLM().bfloat16().float()):
        assert base_fingerprint(other) == found


def test_only_changed_weights_differ():
    model, other = TinyLM(), TinyLM()
    other.blocks[1].up.weight.data[-1, -1] += 0.01
    other.blocks[2].down.bias = nn.Parameter(other.blocks[2].down.bias[None].detach().clone())
    a, b = base_fingerprint(model), base_fingerprint(other)
    assert [name for name in a if a[name] != b[name]] == ["blocks.1.up.weight", "blocks.2.down.bias"]


def test_samples_span_the_complete_tensor():
    for size in (1, 63, 64, 65, 1000):
        for at in (0, size - 1):
            weight = torch.zeros(size)
            weight[at] = 1
            nets = [nn.ParameterList([nn.Parameter(value)]) for value in (torch.zeros(size), weight)]
            assert base_fingerprint(nets[0]) != base_fingerprint(nets[1]), (size, at)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, use_dora=True),
        peft.IA3Config(feedforward_modules=["query"]),
        peft.LoKrConfig(r=2),
        peft.OFTConfig(r=2, oft_block_size=0),
        peft.DeloraConfig(r=2),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_of_every_kind_are_left_out(config):
    model = bert()
    before = base_fingerprint(model)
    add_adapter_(model, config, "query", train=["classifier"])
    assert base_fingerprint(model) == before
    assert base_fingerprint(nn.ModuleDict({"inside": model})) == {f"inside.{name}": one for name, one in before.items()}


def unknown(model):
    return [name for name, value in base_fingerprint(model).items() if value == "?"]


def test_weights_changed_by_an_initialization_are_unknown():
    for start in ("pissa", "olora"):
        model = TinyLM()
        before = base_fingerprint(model)
        add_adapter_(model, peft.LoraConfig(r=2, init_lora_weights=start), "1.up")
        assert unknown(model) == ["blocks.1.up.bias", "blocks.1.up.weight"]
        assert unknown(nn.ModuleDict({"x": model})) == ["x.blocks.1.up.bias", "x.blocks.1.up.weight"]
        refuse_other_base(before, model, "it")
        refuse_other_base(base_fingerprint(model), TinyLM(), "it")


def test_merged_and_trained_weights_are_unknown():
    model = TinyLM()
    add_adapter_(model, peft.LoraConfig(r=2, init_lora_weights=False), "1.up")
    model.blocks[0].norm.requires_grad_(True)
    assert unknown(model) == ["blocks.0.norm.bias", "blocks.0.norm.weight"]
    model.blocks[0].norm.requires_grad_(False)
    merge_adapters_(model)
    assert unknown(model) == ["blocks.1.up.bias", "blocks.1.up.weight"]
    model = TinyLM()
    add_adapter_(model, peft.LoraConfig(r=2, bias="lora_only"), "1.up")
    model.requires_grad_(False)
    assert "blocks.1.up.bias" in unknown(model)


def test_quantised_weights_are_compared_only_with_quantised_ones():
    pytest.importorskip("bitsandbytes")
    from lightning_fasttrain.finetune import quantize_base_

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    a, b = copy.deepcopy(model), copy.deepcopy(model)
    b[1].weight.data.neg_()
    plain = base_fingerprint(model)
    quantize_base_(a)
    quantize_base_(b)
    assert base_fingerprint(a)["0.weight"].startswith("q")
    refuse_other_base(plain, a, "it")
    refuse_other_base(base_fingerprint(a), model, "it")
    with pytest.raises(ValueError, match=r"the values differ in '1.weight'\."):
        refuse_other_base(base_fingerprint(a), b, "it")


def deeper():
    model = TinyLM(depth=4)
    model.load_state_dict(TinyLM().state_dict(), strict=False)
    return model


def renamed():
    model = TinyLM()
    model.layers = model.blocks
    del model.blocks
    return model


def altered():
    model = TinyLM()
    for block in model.blocks[1:]:
        for parameter in block.up.parameters():
            parameter.data.mul_(1.1)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            deeper,
            r"the base model lacked 'blocks.3.down.bias', 'blocks.3.down.weight', 'blocks.3.norm.bias' and 3 more\.",
        ),
        (lambda: TinyLM(depth=2), r"this model lacks 'blocks.2.down.bias', .* and 3 more\."),
        (renamed, r"this model lacks 'blocks.0.down.bias', .* and 15 more\."),
        (altered, r"the values differ in 'blocks.1.up.bias', 'blocks.1.up.weight', 'blocks.2.up.bias' and 1 more\."),
    ],
)
def test_another_base_is_refused_naming_what_differs(make, message):
    expected = base_fingerprint(TinyLM())
    refuse_other_base(expected, TinyLM(), "the file")
    with pytest.raises(ValueError, match=f"the file was trained with another base model than TinyLM: {message}"):
        refuse_other_base(expected, make(), "the file")
