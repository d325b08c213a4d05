"""Which layers a name, a pattern, a class or "all-linear" matches, and the errors if there are none."""

import re

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune.selection.targets import refuse_tied, shortest_names
from tests.support.families import built
from tests.support.nets import HeadFirst, TinyLM

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def llama():
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    return transformers.LlamaForCausalLM(config)


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY))


UP = [f"blocks.{i}.up" for i in range(3)]
DOWN = [f"blocks.{i}.down" for i in range(3)]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", sorted(UP + DOWN)),
        ("up", UP),
        ("1.up", ["blocks.1.up"]),
        ("blocks.0.up", ["blocks.0.up"]),
        ("blocks.*.down", DOWN),
        (re.compile(r"blocks\.[02]\.up"), [UP[0], UP[2]]),
        (nn.Embedding, ["embed"]),
        ("LayerNorm", [f"blocks.{i}.norm" for i in range(3)]),
        (["embed", "2.up"], ["blocks.2.up", "embed"]),
    ],
)
def test_names_patterns_expressions_and_classes_match(targets, expected):
    assert sorted(ft.finetune.find_targets(TinyLM(), targets)) == sorted(expected)


def test_names_match_complete_components_only():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.setup, self.down = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    assert list(ft.finetune.find_targets(Net(), "up")) == ["up"]


def test_target_without_a_match_lists_similar_names_and_candidates():
    with pytest.raises(ValueError, match=r"targets='upp' matches nothing.*up \(Linear\) ×3.*Similar names: .*up"):
        ft.finetune.find_targets(TinyLM(), "upp")
    with pytest.raises(ValueError, match=r"targets='q_proj'"):  # one of two is enough
        ft.finetune.find_targets(TinyLM(), ["up", "q_proj"])
    with pytest.raises(ValueError, match=r"^train='nothing' matches nothing in TinyLM"):
        ft.apply(TinyLM(), [ft.LoRA(rank=2, train="nothing")])
    with pytest.raises(ValueError, match="at least one layer"):
        ft.finetune.find_targets(TinyLM(), [])
    with pytest.raises(TypeError, match=r"targets=\[3\]\): entry 0: expected a string, .* got a whole number"):
        ft.finetune.find_targets(TinyLM(), [3])


@pytest.mark.parametrize(
    ("make", "heads"), [(TinyLM, ["head"]), (llama, ["lm_head"]), (bert, ["bert.pooler.dense", "classifier"])]
)
def test_heads_are_found(make, heads):
    assert ft.finetune.find_heads(make()) == heads


@pytest.mark.parametrize("tied", [False, True])
def test_head_registered_before_the_blocks_is_found_and_skipped(tied):
    pytest.importorskip("bitsandbytes")
    model = HeadFirst(dim=16, tied=tied)
    assert ft.finetune.find_heads(model) == ["lm_head"]
    assert "lm_head" not in ft.finetune.find_targets(model)
    assert ft.finetune.quantize_base_(model).left["lm_head"] == "a head"
    assert model.lm_head.weight.dtype is torch.float32


def test_layers_before_the_blocks_are_not_heads():
    blocks = nn.ModuleList([nn.TransformerEncoderLayer(17, 1, 8) for _ in range(2)])
    parts = {"into": nn.Linear(4, 17), "places": nn.Embedding(17, 17), "blocks": blocks, "out": nn.Linear(17, 2)}
    assert ft.finetune.find_heads(nn.ModuleDict(parts)) == ["out"]


def test_decoder_layers_are_not_heads():
    for name, head in (("BartForConditionalGeneration", "lm_head"), ("T5ForConditionalGeneration", "lm_head"),
                       ("Whisper", "proj_out"), ("FromTorch", "head")):  # fmt: skip
        assert ft.finetune.find_heads(built(name)) == [head]


def test_second_half_of_a_model_is_not_a_head():
    tower = [nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)]
    second = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(4, 4), nn.Tanh())])
    assert ft.finetune.find_heads(nn.Sequential(*tower, second)) == ["3.6"]


def test_only_linear_layer_is_not_a_head_but_the_last_of_several_is():
    assert ft.finetune.find_heads(nn.Sequential(nn.Linear(2, 2))) == []
    assert ft.finetune.find_heads(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))) == ["2"]
    assert ft.finetune.find_heads(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1), nn.Linear(2, 1))) == ["2"]


def test_layers_inside_attention_are_not_linear_layers_of_the_model():
    net = nn.Sequential(*[nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2)], nn.Linear(4, 2))
    assert list(ft.finetune.find_targets(net)) == ["0.linear1", "0.linear2", "1.linear1", "1.linear2"]


def test_tied_layers_are_refused():
    with pytest.raises(ValueError, match=r"target 'head': it shares its weight with 'embed'"):
        refuse_tied(TinyLM(), ["head"])
    refuse_tied(TinyLM(), UP)


@pytest.mark.parametrize("make", [TinyLM, llama, bert])
def test_short_names_match_the_same_layers_in_peft(make):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    model = make()
    names = list(ft.finetune.find_targets(model))
    short = shortest_names(names, model)
    assert len(short) < len(names)
    config = LoraConfig(target_modules=short)
    assert [n for n, _ in model.named_modules() if check_target_module_exists(config, n)] == names


def test_short_names_fall_back_to_a_regular_expression():
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleDict({"a": nn.Linear(2, 2)})})
    short = shortest_names(["a"], net)
    assert isinstance(short, str)
    assert [n for n in ("a", "b", "b.a") if re.fullmatch(short, n)] == ["a"]


def test_adapted_layers_are_found_by_their_original_class():
    import peft

    model = TinyLM()
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2), "up")
    assert list(ft.finetune.find_targets(model, nn.Linear)) == list(ft.finetune.find_targets(TinyLM(), nn.Linear))
    assert torch.is_tensor(model.blocks[0].up.lora_A["default"].weight)


class Router(nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        return scores.softmax(-1), scores


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Grouped(nn.Linear):
    def forward(self, x):
        return torch.einsum("tgi,goi->tgo", x, self.weight.view(2, -1, self.in_features))


class Transposing(nn.Linear):  # as Falcon's
    def forward(self, x):
        return x @ self.weight.T + self.bias


@pytest.mark.parametrize("kind", [Router, Scaled, Grouped])
def test_linear_layers_that_compute_something_else_get_no_adapter(kind):
    net = nn.Sequential(nn.Linear(4, 4), kind(4, 4), Transposing(4, 4), nn.Linear(4, 2))
    state = torch.get_rng_state()
    assert list(ft.finetune.find_targets(net)) == ["0", "2"]
    assert torch.equal(torch.get_rng_state(), state)
    partitioned = Transposing(4, 4)
    partitioned.weight.data = torch.empty(0)  # as DeepSpeed's ZeRO-3 leaves it
    assert list(ft.finetune.find_targets(nn.Sequential(partitioned, nn.Linear(4, 2)))) == ["0"]
    with pytest.raises(TypeError, match=rf"target '1': {kind.__name__} does not compute"):
        ft.finetune.add_adapter_(net, peft.LoraConfig(r=2), "1")


def test_layers_thinner_than_the_rank_are_left_out_of_all_linear_layers(caplog):
    net = nn.ModuleDict({"up": nn.Linear(4, 4), "gate": nn.Linear(4, 1), "down": nn.Linear(4, 4)})
    net["head"] = nn.Linear(4, 9)
    with caplog.at_level("INFO", "lightning_fasttrain"):
        assert ft.finetune.add_adapter_(net, peft.LoraConfig(r=2)) == ["up", "down"]
    assert "its rank would exceed their size: gate" in caplog.text
    assert ft.finetune.add_adapter_(net, peft.LoraConfig(r=2)) == ["up", "down"]  # it is there
    with pytest.raises(ValueError, match="rank=2 for 'gate'"):
        ft.finetune.add_adapter_(nn.ModuleDict({"gate": nn.Linear(4, 1)}), peft.LoraConfig(r=2), "gate")


class Reading(nn.Module):
    """Multiplies with weights that it reads, as WavLM does, and casts to the dtype of one, as LongT5 does."""

    def __init__(self):
        super().__init__()
        self.q, self.out, self.wo, self.up = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.mix(self.up(x))
        return self.wo(x.to(self.wo.weight.dtype))

    def mix(self, x):
        return torch.stack([nn.functional.linear(row, self.q.weight, self.out.bias) @ self.out.weight for row in x])

    def reset(self):
        nn.init.zeros_(self.up.weight)


def test_weights_that_are_read_get_no_adapter_and_stay_unquantised(caplog):
    net = nn.Sequential(Reading(), Reading(), nn.Linear(8, 3))
    with caplog.at_level("INFO", "lightning_fasttrain"):
        assert ft.finetune.add_adapter_(net, peft.LoraConfig(r=2)) == ["0.wo", "0.up", "1.wo", "1.up"]
    assert "since their weights are read without calling them: 0.q, 0.out, 1.q and 1 more" in caplog.text
    net(torch.ones(2, 8)).sum().backward()
    assert all(value.grad is not None for value in net.parameters() if value.requires_grad)
    pytest.importorskip("bitsandbytes")
    plain = nn.Sequential(Reading(), Reading(), nn.Linear(8, 3))
    ft.finetune.quantize_base_(plain)
    kinds = {name: type(layer).__name__ for name, layer in plain[0].named_children()}
    assert kinds == {"q": "Linear", "out": "Linear", "wo": "Linear", "up": "Linear4bit"}
    assert torch.isfinite(plain(torch.ones(2, 8))).all()
