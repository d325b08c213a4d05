"""The new head replaces the old one, and every loss and config uses its size."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.finetune.selection.freezing import freeze_
from lightning_fasttrain.finetune.selection.swap_head import swap_head_
from tests.support.nets import TinyLM, lm_batches, weights

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = torch.randint(1, 32, (2, 5), generator=torch.Generator().manual_seed(0))


def classifier(kind="Bert", task="SequenceClassification", **config):
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **config})
    return getattr(transformers, f"{kind}For{task}")(config).eval()


def llama(**config):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": True, **config}))


def reloaded(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


# --- any module


def test_integer_creates_a_linear_like_the_old_head():
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 10).bfloat16()).eval()
    freeze_(net)
    assert swap_head_(net, 500) == "2"
    assert (net[2].in_features, net[2].out_features, net[2].weight.dtype) == (64, 500, torch.bfloat16)
    assert not net[2].training
    assert net[2].weight.requires_grad
    assert torch.equal(net[2].bias, torch.zeros(500, dtype=torch.bfloat16))
    assert net[2].weight.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert net[2].weight.float().mean().item() == pytest.approx(0, abs=5e-4)


def test_bias_and_device_are_those_of_the_old_head():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 10, bias=False, device="meta"))
    swap_head_(net, 3)
    assert net[2].bias is None
    assert net[2].weight.is_meta


def test_module_is_used_as_it_is():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 10))
    head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    before = weights(head)
    swap_head_(net, head)
    assert net[2] is head
    assert all(torch.equal(value, before[name]) for name, value in weights(head).items())


def test_features_are_unchanged_and_feed_the_new_head():
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True) for _ in range(2)]
    net = nn.Sequential(*blocks, nn.Linear(8, 30))
    x = torch.randn(2, 5, 8)
    features = net[:2](x)
    assert swap_head_(net, 3) == "2"
    assert torch.allclose(net(x), features @ net[2].weight.T + net[2].bias)


def test_a_tied_head_in_a_lightning_module_is_untied_and_this_is_logged(caplog):
    net = TinyLM()
    before = net.embed.weight.detach().clone()
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        assert swap_head_(net, 20, head="head") == "head"
    assert "head was tied to embed.weight, which does not change" in caplog.text
    assert torch.equal(net.embed.weight, before)
    net.loss(lm_batches(1)[0]).backward()
    assert net.head.weight.grad.shape == (20, 8)
    assert net.embed.weight.grad.shape == before.shape


def test_head_in_two_places_is_replaced_in_both():
    net = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 5)})
    net["again"] = net["head"]
    assert swap_head_(net, 2, head="again") == "head"
    assert net["again"] is net["head"]
    assert net["head"].out_features == 2


def test_the_only_linear_layer_is_the_head_if_it_is_last():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 10))
    assert swap_head_(net, 2) == "3"
    with pytest.raises(ValueError, match="no linear layer follows"):
        swap_head_(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1)), 2)


# --- Hugging Face's


@pytest.mark.parametrize(
    ("kind", "task", "head"),
    [
        ("Bert", "SequenceClassification", "classifier"),
        ("Roberta", "SequenceClassification", "classifier.out_proj"),
        ("Bert", "TokenClassification", "classifier"),
        ("Llama", "SequenceClassification", "score"),
    ],
)
def test_classifier_loss_uses_the_new_labels_and_the_model_reloads(kind, task, head, tmp_path):
    model = classifier(kind, task, pad_token_id=0, max_position_embeddings=64)
    assert swap_head_(model, 5) == head
    labels = torch.tensor([[4, 0, 1, 2, 3]] * 2) if "Token" in task else torch.tensor([4, 0])
    out = model(input_ids=IDS, labels=labels)
    assert torch.allclose(out.loss, F.cross_entropy(out.logits.flatten(0, -2), labels.flatten()))
    again = reloaded(model, tmp_path)
    assert torch.equal(again(input_ids=IDS).logits, out.logits)
    assert (again.num_labels, len(again.config.id2label)) == (5, 5)


def test_regression_and_classification_heads_can_be_exchanged():
    model = classifier(num_labels=1)
    model(input_ids=IDS, labels=torch.tensor([0.5, 1.5]))  # from here on the config says "regression"
    swap_head_(model, 3)
    out = model(input_ids=IDS, labels=torch.tensor([2, 1]))
    assert torch.allclose(out.loss, F.cross_entropy(out.logits, torch.tensor([2, 1])))
    swap_head_(model, 1)
    out = model(input_ids=IDS, labels=torch.tensor([0.5, 1.5]))
    assert torch.allclose(out.loss, F.mse_loss(out.logits.squeeze(), torch.tensor([0.5, 1.5])))


def test_heads_of_image_classifiers_are_replaced():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    model = transformers.ResNetForImageClassification(config).eval()
    assert swap_head_(model, 7) == "classifier.1"
    out = model(torch.randn(2, 3, 32, 32), labels=torch.tensor([1, 6]))
    assert torch.allclose(out.loss, F.cross_entropy(out.logits, torch.tensor([1, 6])))


def test_tied_language_model_gets_an_untied_head(tmp_path):
    model = llama().eval()
    before = model.model.embed_tokens.weight.detach().clone()
    assert swap_head_(model, 32) == "lm_head"
    logits = model(input_ids=IDS).logits
    model.tie_weights()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert torch.equal(reloaded(model, tmp_path)(input_ids=IDS).logits, logits)


def test_the_loss_of_a_language_model_uses_the_new_vocabulary_size():
    model = llama().eval()
    with pytest.warns(ft.FastTrainWarning, match=r"has 32 rows, so .*resize_token_embeddings\(40\)"):
        swap_head_(model, 40)
    labels = IDS + 8
    out = model(input_ids=IDS, labels=labels)
    assert torch.allclose(out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    assert model.config.vocab_size == model.vocab_size == 40


def test_configs_of_nested_models_are_updated_too():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = classifier()

    outer = Outer()
    assert swap_head_(outer, 4) == "net.classifier"
    assert outer.net.num_labels == outer.net.config.num_labels == 4


def test_replacing_another_layer_leaves_the_config_unchanged():
    model = classifier(num_labels=3)
    swap_head_(model, nn.Linear(16, 16), head="bert.pooler.dense")
    assert model.num_labels == model.config.num_labels == 3


def test_quantised_head_is_replaced_by_a_plain_one():
    bnb = pytest.importorskip("bitsandbytes")
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), bnb.nn.Linear4bit(64, 10)).to("cpu")
    swap_head_(net, 3)
    assert type(net[2]) is nn.Linear
    assert net(torch.randn(2, 4)).shape == (2, 3)


# --- refusals


def test_a_head_with_an_adapter_is_refused():
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 10))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["2"], r=2), net)
    with pytest.raises(TypeError, match="head '2': it has an adapter"):
        swap_head_(net, 3)


@pytest.mark.parametrize(
    ("new", "head", "error", "message"),
    [
        (0, None, ValueError, "new_head=0"),
        ("3", None, TypeError, "new_head='3'"),
        (True, None, TypeError, "new_head=True"),
        (3, "haed", ValueError, r"head='haed' in TinyLM: there is no such layer.*'blocks.2.down', 'head'"),
        (3, "", ValueError, "an empty string"),
        (3, "blocks.1", ValueError, r"head 'blocks.1' \(Block\): its number of input.*head='blocks.1.down'"),
        (3, "embed", ValueError, r"head 'embed' \(Embedding\): its number of input.*Pass a module instead of 3\."),
        (
            nn.Linear(9, 3),
            "head",
            ValueError,
            r"9 inputs: the input of 'head' has 8 features. Make it nn.Linear\(8",
        ),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_changed(new, head, error, message):
    net = TinyLM()
    before = dict(net.named_modules())
    with pytest.raises(error, match=message):
        swap_head_(net, new, head)
    assert dict(net.named_modules()) == before


def test_model_that_is_only_a_head_is_refused():
    with pytest.raises(ValueError, match=r"head=None in Linear"):
        swap_head_(nn.Linear(4, 2), 3)
