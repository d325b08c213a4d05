"""Residual branches are initialized by the published rules: closed-form variances, and Hugging Face's own GPT-2."""

import math

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from tests.support.nets import TinyLM, same, weights

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}


def spread(weight):
    return float(weight.detach().std())


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, **sizes))


def resnet():
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes))


MODELS = {
    "gpt": (lambda: GPT(GPTConfig(vocabulary=16, context=8, layers=3, heads=2, width=64)), "attention.out", "down"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(vocab_size=16, **WIDE)), "self_attn.o_proj", "mlp.down_proj"),
    "gpt2": (gpt2, "attn.c_proj", "mlp.c_proj"),
    "bert": (lambda: BertModel(BertConfig(vocab_size=16, **WIDE)), "attention.output.dense", "output.dense"),
    "vit": (lambda: ViTModel(ViTConfig(image_size=8, patch_size=4, **WIDE)), "attention.o_proj", "mlp.fc2"),
    "torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 3),
        "self_attn.out_proj",
        "linear2",
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_projections_of_six_families_are_found_and_drawn(model):
    make, *ends = MODELS[model]
    net = make()
    before = weights(net)
    torch.manual_seed(1)
    changed = ft.architecture.init_residual_(net, "gpt2", std=0.05)
    assert len(changed) == 6
    for name, std in changed.items():
        assert name.endswith(tuple(f"{end}.weight" for end in ends))
        assert std == 0.05 / math.sqrt(2 * 3)
        drawn = net.get_parameter(name)
        torch.testing.assert_close(spread(drawn), std, rtol=0.1, atol=0)  # 4,096 values, so 5 of their errors
    others = {name: value for name, value in weights(net).items() if name not in changed}
    assert same(others, {name: before[name] for name in others})


def test_the_rule_is_that_of_hugging_faces_gpt2():
    torch.manual_seed(1)
    net = gpt2()
    changed = ft.architecture.init_residual_(net, "gpt2", std=net.config.initializer_range)
    theirs = [name for name, _ in net.named_parameters() if name.endswith("c_proj.weight")]
    assert list(changed) == theirs
    expected = gpt2()  # drawn by its own rule
    for name, std in changed.items():
        assert std == net.config.initializer_range / math.sqrt(2 * net.config.n_layer)
        torch.testing.assert_close(spread(expected.get_parameter(name)), std, rtol=0.1, atol=0)


def test_the_stream_does_not_grow_with_depth():
    """Each of n branches adds a variance of 1/n of that of one branch."""

    def growth(depth):
        torch.manual_seed(0)
        net = GPT(GPTConfig(vocabulary=64, context=16, layers=depth, heads=2, width=64)).eval()
        ft.architecture.init_residual_(net, "gpt2", std=0.3)
        x = torch.randn(4, 16, 64)
        y = x
        for block in net.blocks:
            y = block(y)
        return float((y - x).detach().var())

    assert 0.7 < growth(16) / growth(2) < 1.4


def test_blocks_start_as_the_identity_with_zeros():
    net = TinyLM()
    changed = ft.architecture.init_residual_(net, "zero")
    assert list(changed) == [f"blocks.{number}.down.{kind}" for number in range(3) for kind in ("weight", "bias")]
    x = torch.rand(2, 3, 8)
    assert torch.equal(net.blocks[0](x)[0], x)


def test_blocks_of_a_resnet_start_as_their_shortcut_with_a_gamma_of_zero():
    net = resnet()
    changed = ft.architecture.init_residual_(net, "zero_gamma")
    assert list(changed) == [
        f"resnet.encoder.stages.{stage}.layers.{layer}.layer.1.normalization.weight"
        for stage in (0, 1)
        for layer in (0, 1)
    ]
    x = torch.rand(2, 8, 6, 6)
    assert torch.equal(net.resnet.encoder.stages[0].layers[1](x), x)
    widens = net.resnet.encoder.stages[1].layers[0]
    assert torch.equal(widens(x), torch.relu(widens.shortcut(x)))


def xavier(weight):
    rows, columns = weight.shape
    return math.sqrt(2 / (rows + columns))


@pytest.mark.parametrize("model", ["gpt", "llama", "gpt2", "torch"])
def test_t_fixup_scales_values_outputs_and_mlps(model):
    make = MODELS[model][0]
    net = make()
    torch.manual_seed(2)
    changed = ft.architecture.init_residual_(net, "t_fixup")
    factor = 0.67 * 3**-0.25
    assert set(changed.values()) == {factor}
    assert len(changed) == 3 * (5 if model == "llama" else 4)
    for name in changed:
        weight = net.get_parameter(name)
        weight = weight.T if model == "gpt2" else weight
        if weight.shape[0] == 3 * weight.shape[1]:
            queries, keys, values = weight.chunk(3)
            for part in (queries, keys):
                torch.testing.assert_close(spread(part), xavier(part), rtol=0.1, atol=0)
            weight = values
        torch.testing.assert_close(spread(weight), factor * xavier(weight), rtol=0.1, atol=0)


def test_t_fixup_of_encoder_and_decoder_is_the_papers():
    torch.manual_seed(2)
    sizes = {"d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 3}
    net = T5ForConditionalGeneration(T5Config(vocab_size=100, **sizes))
    changed = ft.architecture.init_residual_(net, "t_fixup")
    decoder, encoder = (9 * 3) ** -0.25, 0.67 * 2**-0.25
    for name, factor in changed.items():
        expected = encoder if name.startswith("encoder.block") else decoder
        assert factor == expected
    v = net.decoder.block[0].layer[1].EncDecAttention.v.weight
    torch.testing.assert_close(spread(v), decoder * xavier(v), rtol=0.1, atol=0)
    torch.testing.assert_close(spread(net.shared.weight), decoder / 8, rtol=0.05, atol=0)
    q = net.decoder.block[0].layer[0].SelfAttention.q.weight
    torch.testing.assert_close(spread(q), xavier(q), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("net", "recipe", "why"),
    [
        (lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), "gpt2", r"in block '0': neither attention"),
        (TinyLM, "zero_gamma", r"no BatchNorm or GroupNorm ends.*'norm' \(LayerNorm\), 'up' \(Linear\)"),
        (TinyLM, "t_fixup", r"no attention with a layer of values.*'down' \(Linear\)"),
        (TinyLM, "fixup", "recipe='fixup'"),
    ],
)
def test_a_block_without_such_layers_is_refused_with_its_layers(net, recipe, why):
    with pytest.raises(ValueError, match=why):
        ft.architecture.init_residual_(net(), recipe)


def test_blocks_can_be_named_and_skipped():
    assert list(ft.architecture.init_residual_(TinyLM(), "gpt2", skip="blocks.0")) == [
        "blocks.1.down.weight",
        "blocks.2.down.weight",
    ]
    (std,) = ft.architecture.init_residual_(TinyLM(), "gpt2", blocks="blocks.2").values()
    assert std == 0.02
