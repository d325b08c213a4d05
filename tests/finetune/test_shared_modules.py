"""Modules in several places and tied weights: trained, saved, merged and exported as one, or refused by name."""

import copy

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import (
    account_bytes,
    add_adapter_,
    export_model,
    freeze_except_,
    load_adapter_,
    merge_adapters_,
    quantize_base_,
    save_adapter,
    unload_adapters_,
    unmerge_adapters_,
)

SMALL = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
BART = {
    **{**SMALL, "encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8},
    **{"dropout": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2},
}
T5 = {"vocab_size": 20, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "dropout_rate": 0.0}
FAMILIES = {
    "T5ForConditionalGeneration": {**T5, "decoder_start_token_id": 0},
    **dict.fromkeys(("BartForConditionalGeneration", "MBartForConditionalGeneration"), BART),
    **dict.fromkeys(("PegasusForConditionalGeneration", "MarianMTModel"), BART),
}
IDS = torch.arange(1, 19).view(2, 9)
NEW = [20, 21]
every_family = pytest.mark.parametrize("family", FAMILIES)
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",  # PEFT asks for it
    "ignore:Model has `tie_word_embeddings=True`",
    "ignore:save_adapter. .*has an adapter. it is also",
)


def build(family, tied=True, resized=True):
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    model = kind(kind.config_class(**FAMILIES[family], tie_word_embeddings=tied))
    if resized:
        model.resize_token_embeddings(22, mean_resizing=False)
    return model


def shared_names(model):
    """All names of each module in several places."""
    names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [places for places in names.values() if len(places) > 1]


@torch.no_grad()
def logits(model):
    ids = IDS if model.config.vocab_size == 20 else IDS + 3  # the new tokens too
    return model.eval()(input_ids=ids, labels=ids).logits


def train_(model):
    """A step of everything that trains; return the logits afterwards."""
    ids = IDS if model.config.vocab_size == 20 else IDS + 3
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return logits(model)


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def lora(**more):
    return peft.LoraConfig(r=2, init_lora_weights=False, **more)


def tables_and_head(model):
    """Names of all embeddings of tokens, the last ones of those with several, and of the head."""
    names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name.endswith(("shared", "embed_tokens")):
            names[module] = name
    return [*names.values(), "lm_head"]


@tied_or_not
@pytest.mark.parametrize(
    ("family", "resized"), [*((family, True) for family in FAMILIES), ("T5ForConditionalGeneration", False),
                            ("MarianMTModel", False)]
)  # fmt: skip
def test_embeddings_train_in_full(family, tied, resized, tmp_path):
    model, plain = build(family, tied, resized), build(family, tied, resized)
    before = logits(model)
    add_adapter_(model, lora(), "all-linear", train=tables_and_head(model))
    assert shared_names(model)[:1] == shared_names(plain)[:1]
    expected = train_(model)
    assert (expected - before).abs().max() > 0.05
    save_adapter(model, tmp_path / "adapter")
    load_adapter_(plain, tmp_path / "adapter")
    assert torch.equal(logits(plain), expected)
    theirs = peft.PeftModel.from_pretrained(build(family, tied, resized), tmp_path / "adapter")
    assert torch.equal(logits(theirs), expected)
    export_model(model, tmp_path / "model")
    same(logits(type(model).from_pretrained(tmp_path / "model")), expected)
    assert torch.equal(logits(model), expected)
    unload_adapters_(model)
    same(logits(model), expected)
    assert list(model.state_dict()) == list(build(family, tied, resized).state_dict())
    assert shared_names(model) == shared_names(build(family, tied, resized))


@every_family
@tied_or_not
def test_new_rows_train_wherever_the_embedding_is(family, tied, tmp_path):
    model, plain = build(family, tied), build(family, tied)
    add_adapter_(model, lora(trainable_token_indices=NEW), ["q" if "T5" in family else "k_proj"])
    expected = train_(model)
    save_adapter(model, tmp_path / "adapter")
    load_adapter_(plain, tmp_path / "adapter")
    assert torch.equal(logits(plain), expected)
    export_model(model, tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    same(logits(again), expected)
    encoder = again.get_encoder().get_input_embeddings().weight
    assert not torch.equal(encoder[NEW], build(family, tied).get_encoder().get_input_embeddings().weight[NEW])
    assert torch.equal(encoder[:20], build(family, tied).get_encoder().get_input_embeddings().weight[:20])


def test_rows_of_an_untied_head_are_saved_and_exported(tmp_path):
    model, plain = build("BartForConditionalGeneration", False), build("BartForConditionalGeneration", False)
    add_adapter_(model, lora(trainable_token_indices={"lm_head": NEW}), ["k_proj"])
    expected = train_(model)
    save_adapter(model, tmp_path / "adapter")
    load_adapter_(plain, tmp_path / "adapter")
    assert torch.equal(logits(plain), expected)
    theirs = peft.PeftModel.from_pretrained(build("BartForConditionalGeneration", False), tmp_path / "adapter")
    assert torch.equal(logits(theirs), expected)
    export_model(model, tmp_path / "model")
    same(logits(type(model).from_pretrained(tmp_path / "model")), expected)
    smaller = build("BartForConditionalGeneration", False, resized=False)
    with pytest.raises(ValueError, match="trained rows '20', '21' of 'lm_head', which has 20"):
        load_adapter_(smaller, tmp_path / "adapter", check_base=False)


@pytest.mark.parametrize(
    ("config", "targets", "train", "why"),
    [
        ({}, "encoder.embed_tokens", (), "target 'shared': it shares its weight with 'lm_head'"),
        ({}, "lm_head", (), "target 'lm_head': it shares its weight with 'shared'"),
        ({}, ["q"], ["decoder.embed_tokens"], "name all there, where they stay tied: 'shared', 'lm_head'"),
        ({}, ["encoder.**.q"], ["decoder"], "target 'decoder.embed_tokens': it shares its weight with 'shared'"),
        ({"trainable_token_indices": {"lm_head": NEW}}, ["q"], (), "'lm_head': it shares its weight with 'shared'"),
        ({"trainable_token_indices": {"shared": NEW, "lm_head": [3]}}, ["q"], (), "shares its weight with"),
    ],
)
def test_half_of_a_tied_weight_is_refused(config, targets, train, why):
    model = build("T5ForConditionalGeneration")
    before = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ValueError, match=why):
        add_adapter_(model, lora(**config), targets, train=train)
    assert dict(model.named_modules(remove_duplicate=False)) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_export_refuses_what_the_configuration_would_tie(tmp_path):
    model = build("T5ForConditionalGeneration")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    with pytest.raises(ValueError, match="'lm_head.weight' was trained apart from the weight that the configuration"):
        export_model(model, tmp_path / "model")


def test_adapters_of_peft_under_one_of_two_names_are_not_merged():
    model = build("BartForConditionalGeneration", False)
    theirs = peft.get_peft_model(model, lora(target_modules=["shared"]))
    with pytest.raises(ValueError, match="'base_model.model.model.shared': it shares its weight with .*encoder.embed"):
        merge_adapters_(theirs)


class Mirror(nn.Module):
    """One layer in two places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.mid = nn.Linear(64, 64), nn.Linear(64, 64)
        self.down, self.head = self.up, nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.down(self.mid(self.up(x)).tanh()))


class Apart(Mirror):
    """Two equal layers."""

    def __init__(self):
        super().__init__()
        self.down = copy.deepcopy(self.up)


X = torch.linspace(-1, 1, 128).view(2, 64)


@pytest.mark.parametrize("name", ["up", "down"])
def test_layer_in_two_places_has_one_adapter(name):
    model, plain = Mirror(), Mirror()
    assert add_adapter_(model, peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False), name) == ["up"]
    assert model.down is model.up
    with torch.no_grad():
        a, b = model.up.lora_A["default"].weight, model.up.lora_B["default"].weight
        plain.up.weight += 2 * b @ a  # of both places
    expected = model(X)
    torch.testing.assert_close(expected, plain(X))
    merge_adapters_(model)
    torch.testing.assert_close(model(X), expected)
    unmerge_adapters_(model)
    assert torch.equal(model(X), expected)
    unload_adapters_(model)
    assert model.down is model.up
    torch.testing.assert_close(model(X), expected)


def test_module_in_two_places_trains_in_full(tmp_path):
    model, again = Mirror(), Mirror()
    add_adapter_(model, lora(), "mid", train=["down"])
    with torch.no_grad():
        model.up.modules_to_save["default"].weight += 1
    expected = model(X)
    save_adapter(model, tmp_path)
    load_adapter_(again, tmp_path)
    assert torch.equal(again(X), expected)
    assert again.down is again.up
    assert torch.equal(peft.PeftModel.from_pretrained(Mirror(), tmp_path)(X), expected)
    assert set(ft.finetune.trained_state(model)) >= {
        f"{name}.modules_to_save.default.weight" for name in ("up", "down")
    }
    unload_adapters_(model)
    torch.testing.assert_close(model(X), expected)


def test_places_that_peft_trained_apart_are_refused(tmp_path):
    theirs = peft.get_peft_model(Mirror(), lora(target_modules=["mid"], modules_to_save=["up", "down"]))
    theirs.save_pretrained(tmp_path / "equal")
    theirs.base_model.model.down.modules_to_save["default"].bias.data += 1
    theirs.save_pretrained(tmp_path / "apart")
    load_adapter_(Mirror(), tmp_path / "equal")
    with pytest.raises(ValueError, match="'up.bias' and 'down.bias' are of one module .* differ in the file"):
        load_adapter_(Mirror(), tmp_path / "apart")
    loaded = load_adapter_(Apart(), tmp_path / "apart")
    assert loaded == ["mid"]


def test_peft_adapts_a_layer_in_two_places_once(tmp_path):
    """Whatever names the file has, so that a warning is all that can be done."""
    model = Mirror()
    add_adapter_(model, lora(), ["up", "mid"])
    with pytest.warns(ft.FastTrainWarning, match="'up' has an adapter: it is also 'down', and PEFT would"):
        save_adapter(model, tmp_path)
    for targets in (["up", "mid"], ["up", "down", "mid"], ["down", "mid"]):
        theirs = peft.get_peft_model(Mirror(), lora(target_modules=targets)).base_model.model
        assert not hasattr(theirs.down, "lora_A")


def test_failed_adapter_leaves_every_place_as_it_was(monkeypatch):
    model = Mirror()
    up = model.up
    fails = "lightning_fasttrain.finetune.adapters.add_adapter.see_adapters_"
    monkeypatch.setattr(fails, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add_adapter_(model, lora(), "down")
    assert model.up is model.down is up


def test_parts_of_one_buffer_are_not_shared():
    model, flat = Mirror(), torch.randn(2, 64, 64)
    model.up.weight, model.mid.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    assert add_adapter_(model, lora(), ["up", "mid"]) == ["up", "mid"]


def test_views_of_one_tensor_are_refused():
    model = Mirror()
    model.mid.weight = nn.Parameter(model.up.weight.detach()[:])
    with pytest.raises(ValueError, match="target 'mid': it shares its weight with 'up'"):
        add_adapter_(model, lora(), "mid")
    with pytest.raises(ValueError, match="'mid': it shares its weight|'up': it shares its weight"):
        add_adapter_(model, lora(), "head", train=["up", "mid"])


def test_merging_into_a_computed_weight_is_refused():
    model = Mirror()
    parametrizations.weight_norm(model.mid)
    add_adapter_(model, lora(), "mid")
    expected = model(X)
    with pytest.raises(TypeError, match="'mid': its weight is computed .*remove_parametrizations"):
        merge_adapters_(model)
    assert torch.equal(model(X), expected)


def test_shared_layer_is_quantised_once():
    pytest.importorskip("bitsandbytes")
    model = Mirror()
    report = quantize_base_(model, skip="down")
    assert report.left["up"] == "skip"
    assert quantize_base_(model).quantized == ("up",)
    assert model.down is model.up
    add_adapter_(model, lora(), "down")
    expected = model(X)
    merge_adapters_(model, into="dequantized")
    torch.testing.assert_close(model(X), expected, atol=1e-4, rtol=1e-4)
    assert sum(name.startswith(("up", "down")) for name in account_bytes(model).nbytes) == 4


class Looped(nn.Module):
    """Blocks that share their MLP."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 1, 8) for _ in range(blocks)])
        for block in self.blocks:
            block.linear1, block.linear2 = self.blocks[0].linear1, self.blocks[0].linear2


def test_mlp_that_blocks_share_is_not_upcycled():
    model = Looped()
    with pytest.raises(ValueError, match=r"'blocks.1.linear1': it shares its weight with 'blocks.0.linear1'"):
        ft.architecture.upcycle_(model, 2)
    model.blocks[3].linear1, model.blocks[3].linear2 = nn.Linear(4, 8), nn.Linear(8, 4)
    skip = ["blocks.1.linear1", "blocks.2.linear2"]
    assert ft.architecture.upcycle_(model, 2, skip=skip) == ["blocks.3.linear1", "blocks.3.linear2"]


@pytest.mark.parametrize("name", ["up", "down"])
def test_any_name_freezes_and_groups(name):
    model = Mirror()
    assert freeze_except_(model, name) == ["up.weight", "up.bias"]
    model = Mirror()
    undecayed = ft.optim.decay_groups(model, 0.1, spared=f"{name}.weight")[1]
    assert any(parameter is model.up.weight for parameter in undecayed["params"])
    assert len(undecayed["params"]) == 4
    unfreezing = ft.finetune.Unfreezing(model, [name])
    assert unfreezing.groups[0] == [f"{name}.weight", f"{name}.bias"]


def test_shared_weights_count_once():
    model = build("T5ForConditionalGeneration")
    add_adapter_(model, lora(), "all-linear", train=["shared", "lm_head"])
    groups = ft.optim.lora_plus_groups(model, 0.1)
    parameters = [parameter for group in groups for parameter in group["params"]]
    assert len(parameters) == len(set(parameters)) == len([p for p in model.parameters() if p.requires_grad])
    account = account_bytes(model)
    assert account.trained == sum(parameter.nbytes for parameter in set(parameters))
    assert account.total == sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def test_copies_share_too():
    model = Mirror()
    add_adapter_(model, lora(), "down")
    again = copy.deepcopy(model)
    assert again.up is again.down
    assert torch.equal(again(X), model(X))
