"""In eval torch passes the weights of its encoder layers to one fused kernel: adapters must act nevertheless."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward
from tests.finetune.test_merge import awake, relative
from tests.support.nets import same, weights

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2))
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
KINDS = {
    "lora": lambda: ft.LoRA(rank=2),
    "dora": lambda: ft.LoRA(rank=2, variant="dora"),
    "ia3": lambda: ft.finetune.IA3(),
    "attention": lambda: ft.LoRA(rank=2, targets=["self_attn"]),
    "whole": lambda: ft.LoRA(rank=2, targets=["linear2"], train=["linear1", "norm1"]),
}


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def adapted(kind):
    model = encoder()
    ft.apply(model, [KINDS[kind]()])
    return awake(model).eval()


def output(model, padding=None):
    with torch.no_grad():
        return model(X, src_key_padding_mask=padding)


def on_the_slow_path(model):
    """Return torch's output with a hook on a layer, which disables the fast path."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.norm2.register_forward_pre_hook(lambda *_: None)
    return output(model)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_uses_adapters_in_fast_paths(kind):
    model = adapted(kind)
    trained = model.train()(X).detach()
    model.eval()
    assert relative(output(model), output(encoder())) > 0.01
    assert relative(output(model), trained) < 1e-6
    assert torch.equal(output(model), on_the_slow_path(model))
    there = ~PADDED
    padded = model.train()(X, src_key_padding_mask=PADDED).detach()
    assert relative(output(model.eval(), PADDED)[there], padded[there]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_merging_keeps_outputs_and_unloading_restores_torchs_layers(kind):
    model = adapted(kind)
    beside = output(model)
    ft.finetune.merge_adapters_(model)
    assert relative(output(model), beside) < 1e-6
    ft.finetune.unmerge_adapters_(model)
    assert torch.equal(output(model), beside)
    ft.finetune.unload_adapters_(model)
    assert relative(output(model), beside) < 1e-6
    assert not any(isinstance(vars(m).get("forward"), WrappedForward) for m in model.modules())
    assert output(model, PADDED)[PADDED].abs().sum() == 0  # torch's own fast path fills padding with zeros


@pytest.mark.parametrize("kind", KINDS)
def test_base_model_is_bitwise_the_pretrained_encoder_in_eval(kind):
    model, plain = adapted(kind), encoder()
    with ft.finetune.base_model(model) as base:
        assert torch.equal(output(base), output(plain))
        assert torch.equal(output(base, PADDED), output(plain, PADDED))
    ft.finetune.unload_adapters_(model, merge=False)
    assert same(weights(model), weights(plain))
    assert torch.equal(output(model), output(plain))


def test_adapter_in_attention_leaves_frozen_weights_unchanged():
    model = adapted("attention")
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    for _ in range(3):
        model.train()(X).square().mean().backward()
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())


def test_copies_and_pickles_use_their_own_adapters():
    model = adapted("lora")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(other), output(model))
        other.layers[0].linear1.lora_B["default"].weight.data.mul_(2)
        assert relative(output(other), output(model)) > 0.001


def test_a_refused_adapter_leaves_no_wrapper():
    model = encoder()
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2), "layers.0.linear1")
    with pytest.raises(ValueError, match="IA3 beside LORA"):
        ft.finetune.add_adapter_(model, peft.IA3Config(feedforward_modules=[]), "layers.1.linear1")
    assert "forward" not in vars(model.layers[1])
