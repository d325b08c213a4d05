"""Groups and learning rates, against values by hand, and against PEFT for LoRA+."""

import logging
import re

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.optim import layer_decay_groups, lora_plus_groups
from tests.support.families import built
from tests.support.nets import HeadFirst, TinyLM, fit, largest_difference, lm_batches, names_in, weights

# PEFT uses a deprecated name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


DECODERS = ["BartForConditionalGeneration", "T5ForConditionalGeneration", "Whisper", "FromTorch"]


def rates(groups, key="lr"):
    return {group["name"]: group[key] for group in groups}


def assert_each_once(net, groups):
    listed = [parameter for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(net.parameters())
    assert len({group["name"] for group in groups}) == len(groups)


def tiny_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
    )
    return transformers.BertForSequenceClassification(config)


def tiny_llama(**settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16, **settings
    )
    return transformers.LlamaForCausalLM(config)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)


class Stages(nn.Module):
    """Like a ResNet or a Swin: blocks in stages, with modules between the stages."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.conv = nn.Conv2d(3, 4, 3)
        self.stage1 = nn.Sequential(Residual(4), Residual(4))
        self.between = nn.Conv2d(4, 8, 1)
        self.stage2 = nn.Sequential(Residual(8), Residual(8))
        self.fc = nn.Linear(8, 2)


# By depth


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_registered_first_has_the_full_rate_unless_tied(tied):
    net = HeadFirst(tied=tied)
    groups = layer_decay_groups(net, lr=1.0, decay=0.5)
    assert_each_once(net, groups)
    named = names_in(net, groups)
    ends = ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    if tied:
        assert named["stem/no_decay"] == ["lm_head.weight"]
        assert named["head/no_decay"] == ends
        return
    assert named["stem/no_decay"] == ["transformer.wte.weight"]
    assert named["head"] == ["lm_head.weight"]
    assert named["head/no_decay"] == ends


@pytest.mark.parametrize(
    "family", ["BartForConditionalGeneration", "T5ForConditionalGeneration", "Whisper", "FromTorch"]
)
def test_no_layer_of_a_decoder_has_the_learning_rate_of_the_head(family):
    net = built(family)
    groups = layer_decay_groups(net, lr=1.0, decay=0.5)
    assert_each_once(net, groups)
    named, rate = names_in(net, groups), rates(groups)
    head = [name for group in ("head", "head/no_decay") for name in named.get(group, [])]
    assert not [name for name in head if re.search(r"\d", name)]  # no module of a list
    first = next(group for group in named if "decoder" in group)
    assert max(rate[group] for group in named if "encoder" in group) < rate[first] < 1


def test_a_decoder_outside_of_blocks_is_named():
    with pytest.warns(UserWarning, match=r"body\.decoder\.layers\.0, .* would count as head"):
        layer_decay_groups(built("FromTorch"), lr=1.0, blocks="body.encoder.layers.*")
    layer_decay_groups(built("FromTorch"), lr=1.0, blocks="body.encoder.layers.*", head=["body.decoder"])


def test_the_tiny_language_model_matches_groups_by_hand():
    net = TinyLM(depth=2)
    groups = layer_decay_groups(net, lr=1.0, decay=0.5, weight_decay=0.1)
    assert names_in(net, groups) == {
        "stem/no_decay": ["embed.weight"],  # the head is tied to it
        "blocks.0": ["blocks.0.up.weight", "blocks.0.down.weight"],
        "blocks.0/no_decay": [f"blocks.0.{p}" for p in ("norm.weight", "norm.bias", "up.bias", "down.bias")],
        "blocks.1": ["blocks.1.up.weight", "blocks.1.down.weight"],
        "blocks.1/no_decay": [f"blocks.1.{p}" for p in ("norm.weight", "norm.bias", "up.bias", "down.bias")],
    }
    assert list(rates(groups).values()) == [0.125, 0.25, 0.25, 0.5, 0.5]
    assert list(rates(groups, "weight_decay").values()) == [0.0, 0.1, 0.0, 0.1, 0.0]
    assert_each_once(net, groups)


def test_bert_matches_groups_by_hand():
    net = tiny_bert()
    groups = layer_decay_groups(net, lr=1.0, decay=0.5)
    names = names_in(net, groups)
    assert list(rates(groups).items()) == [
        ("stem/no_decay", 0.125),
        ("bert.encoder.layer.0", 0.25),
        ("bert.encoder.layer.0/no_decay", 0.25),
        ("bert.encoder.layer.1", 0.5),
        ("bert.encoder.layer.1/no_decay", 0.5),
        ("head", 1.0),
        ("head/no_decay", 1.0),
    ]
    assert all(name.startswith("bert.embeddings.") for name in names["stem/no_decay"])
    assert names["head"] == ["bert.pooler.dense.weight", "classifier.weight"]
    assert_each_once(net, groups)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_matches_groups_by_hand(tied):
    net = tiny_llama(tie_word_embeddings=tied)
    groups = layer_decay_groups(net, lr=1.0, decay=0.5)
    names = names_in(net, groups)
    assert names["stem/no_decay"] == ["model.embed_tokens.weight"]
    assert names["head/no_decay"] == ["model.norm.weight"]
    assert names.get("head", []) == ([] if tied else ["lm_head.weight"])
    assert rates(groups)["model.layers.0"] == 0.25
    assert_each_once(net, groups)


def of_transformers(kind, **settings):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind).config_class(**settings)
    return getattr(transformers, kind)(config)


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
FAMILIES = {
    "GPT2LMHeadModel": {"vocab_size": 16, "n_embd": 8, "n_layer": 4, "n_head": 2, "n_positions": 8},
    "BertForSequenceClassification": {"vocab_size": 16, **SMALL},
    "ViTForImageClassification": {"image_size": 8, "patch_size": 4, **SMALL},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_learning_rates_are_the_closed_form_of_the_depth_under_a_schedule(kind):
    """With four blocks, block i (from 0) has lr · 0.75^(4 − i), the stem lr · 0.75^5, the head lr, at all times."""
    net = of_transformers(kind, **FAMILIES[kind])
    optimizer = ft.build_optimizer(net, "adamw", lr=1e-2, layer_decay=0.75, weight_decay=0.1)
    assert_each_once(net, optimizer.param_groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    of_parameter = {id(p): name for name, p in net.named_parameters()}
    for step in range(3):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                block = re.search(r"\.(?:h|layer|layers)\.(\d)\.", of_parameter[id(parameter)])
                is_stem = re.search(r"embed|wte|wpe|cls_token", of_parameter[id(parameter)]) is not None
                above = 4 - int(block[1]) if block else 5 * is_stem
                assert group["lr"] == pytest.approx(1e-2 * 0.75**above / (1 + step)), of_parameter[id(parameter)]
                if block is not None:
                    assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.75**5 / 4)


def test_adapters_have_the_learning_rates_of_their_blocks():
    net = of_transformers("GPT2LMHeadModel", **FAMILIES["GPT2LMHeadModel"])
    with ft.apply(net, [ft.LoRA(rank=2)]):
        optimizer = ft.build_optimizer(net, "adamw", lr=1.0, layer_decay=0.5)
        named = names_in(net, optimizer.param_groups)
        assert rates(optimizer.param_groups) == {f"transformer.h.{i}": 0.5 ** (4 - i) for i in range(4)}
        assert all("lora_" in name for names in named.values() for name in names)
        assert sum(map(len, named.values())) == sum(p.requires_grad for p in net.parameters())


def test_modules_between_blocks_belong_to_the_earlier_block():
    net = Stages()
    groups = layer_decay_groups(net, lr=1.0, decay=0.5)
    names = names_in(net, groups)
    assert names["stem"] == ["conv.weight"]
    assert names["stem/no_decay"] == ["token", "conv.bias"]
    assert names["stage1.1"] == ["stage1.1.conv.weight", "between.weight"]
    assert names["head"] == ["fc.weight"]
    assert [rates(groups)[f"stage{i}.{j}"] for i, j in ((1, 0), (1, 1), (2, 0), (2, 1))] == [0.5**4, 0.5**3, 0.25, 0.5]
    assert_each_once(net, groups)


class Classifier(L.LightningModule):
    """Creates its head before its backbone."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(8, 2)
        self.backbone = TinyLM(depth=2)


def test_a_head_listed_first_can_be_named():
    net = Classifier()
    unnamed = layer_decay_groups(net, lr=1.0, decay=0.5)
    assert "classifier.weight" in names_in(net, unnamed)["stem"]
    groups = layer_decay_groups(net, lr=1.0, decay=0.5, head="classifier")
    assert names_in(net, groups)["head"] == ["classifier.weight"]
    assert rates(groups)["head"] == 1.0
    assert "stem" not in names_in(net, groups)
    assert_each_once(net, groups)


def test_stem_and_head_are_logged(caplog):
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, "lightning_fasttrain"):
        layer_decay_groups(tiny_bert(), lr=1.0)
    assert "the stem is bert.embeddings.word_embeddings, " in caplog.text
    assert "then 2 blocks; the head is bert.pooler.dense, classifier" in caplog.text


def test_frozen_parameters_are_optional_and_quantized_ones_excluded():
    net = TinyLM(depth=2)
    net.blocks[0].requires_grad_(False)
    net.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with_frozen = names_in(net, layer_decay_groups(net, lr=1.0))
    assert "codes" not in {name for names in with_frozen.values() for name in names}
    assert "blocks.0.up.weight" in with_frozen["blocks.0"]
    without = layer_decay_groups(net, lr=1.0, decay=0.5, frozen=False)
    assert rates(without)["stem/no_decay"] == 0.125  # the depth counts frozen blocks, too
    assert not [name for names in names_in(net, without).values() for name in names if name.startswith("blocks.0.")]


def test_a_decay_of_one_trains_as_without_groups():
    class Net(TinyLM):
        def configure_optimizers(self):
            return torch.optim.AdamW(layer_decay_groups(self, lr=0.01, decay=1.0, weight_decay=0.0))

    batches = lm_batches(4)
    plain = fit(TinyLM(weight_decay=0.0), batches)
    assert largest_difference(weights(plain), weights(fit(Net(), batches))) == 0


def test_names_with_a_common_prefix_are_distinguished():
    net = nn.ModuleList([nn.Linear(2, 2) for _ in range(11)])
    names = names_in(net, layer_decay_groups(net, lr=1.0))
    assert names["1"] == ["1.weight"]
    assert names["10"] == ["10.weight"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 0}, "decay=0: expected the ratio"),
        ({"decay": 1.1}, "decay=1.1"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"lr": 0}, r"lr=0\): it must be greater than 0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1\): it must be at least 0"),
        ({"head": "classifier"}, "head='classifier' in TinyLM: no such module.*its children are embed, blocks, head"),
        ({"blocks": "Conv2d"}, "matches nothing"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        layer_decay_groups(TinyLM(), **{"lr": 1.0, **settings})


def test_a_model_without_blocks_or_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no repeated blocks"):
        layer_decay_groups(nn.Linear(2, 2), lr=1.0)
    with pytest.raises(ValueError, match="TinyLM with frozen=False: all its parameters are frozen"):
        layer_decay_groups(TinyLM().requires_grad_(False), lr=1.0, frozen=False)


# LoRA+


ADAPTERS = {
    "linear": {"target_modules": ["q_proj", "v_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
}


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_all_learning_rates_are_those_of_pefts_function(settings):
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    net = peft.get_peft_model(tiny_llama(attention_bias=True), peft.LoraConfig(r=2, **settings))
    theirs = create_loraplus_optimizer(net, torch.optim.SGD, lr=0.5, loraplus_lr_ratio=8.0)
    expected = {p: group["lr"] for group in theirs.param_groups for p in group["params"]}
    groups = lora_plus_groups(net, lr=0.5, ratio=8.0)
    assert {p: group["lr"] for group in groups for p in group["params"]} == expected
    assert len(expected) == sum(len(group["params"]) for group in groups)
    assert set(expected) == {p for p in net.parameters() if p.requires_grad}


def test_only_matrices_have_weight_decay():
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, use_dora=True, **ADAPTERS["linear"]))
    groups = lora_plus_groups(net, lr=0.5, weight_decay=0.1)
    assert rates(groups, "weight_decay") == {"A": 0.1, "B": 0.1, "B/no_decay": 0.0}
    assert {p.ndim for group in groups if group["weight_decay"] == 0 for p in group["params"]} == {1}


def test_a_model_without_adapters_or_with_frozen_ones_is_refused():
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="TinyLM has no lora_B: no adapter can be trained. Add LoRA"):
        lora_plus_groups(TinyLM(), lr=0.1)
    net = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, **ADAPTERS["linear"])).requires_grad_(False)
    with pytest.raises(ValueError, match="4 B matrices, all frozen: .*Enable the adapter"):
        lora_plus_groups(net, lr=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0}, r"ratio=0\): it must be greater than 0"),
        ({"ratio": -1}, "ratio=-1"),
        ({"lr": -1}, "lr=-1"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"embedding_lr": -1}, "embedding_lr=-1"),
    ],
)
def test_invalid_learning_rates_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        lora_plus_groups(TinyLM(), **{"lr": 0.1, **settings})
