"""Which parameters are decayed, by name; lists written by hand are the reference."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import lightning_fasttrain as ft
from tests.support.nets import HeadFirst, TinyLM, heard, names_in


class Vision(nn.Module):
    """Bare tensors of vision models."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.bn = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.experts = nn.Parameter(torch.zeros(2, 4, 4))


def test_only_weights_of_products_are_decayed():
    model = Vision()
    groups = ft.optim.decay_groups(model, 0.2)
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    found = names_in(model, groups)
    products = ["experts", "patches.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    assert found["decay"] == products
    assert set(found["no_decay"]) == {name for name, _ in model.named_parameters()} - set(found["decay"])


class Unusual(nn.Module):
    """Multi-dimensional parameters that are not weights of products, and weights with unusual names."""

    def __init__(self):
        super().__init__()
        self.A_log, self.latents = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(16, 4))
        self.pos, self.queries = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.zeros(3, 4))
        self.layer_scale, self.log_dt = nn.Parameter(torch.zeros(1, 4, 1, 1)), nn.Parameter(torch.zeros(2, 4))
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 3))
        self.old = nn.utils.weight_norm(nn.Conv1d(4, 3, 2))
        self.score = parametrizations.spectral_norm(nn.Linear(4, 1))  # [1, 4], but a weight of a product
        self.value = nn.Linear(4, 1)
        self.marked, self.listed = nn.Parameter(torch.zeros(4, 4)), Listed()
        self.marked._no_weight_decay = True
        self.proj, self.query = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))
        self.experts_logits = nn.Parameter(torch.zeros(2, 4, 4))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.exempt, self.product = nn.Linear(4, 4), nn.Linear(4, 4)

    def no_weight_decay(self):
        return {"exempt.weight"}


UNUSUAL = [
    "proj", "query", "experts_logits", "attention.in_proj_weight", "attention.out_proj.weight",
    "normed.parametrizations.weight.original1", "old.weight_v", "score.parametrizations.weight.original",
    "value.weight", "listed.product.weight",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_gains_positions_latents_and_logarithms_are_not_decayed():
    model = Unusual()
    found = names_in(model, ft.optim.decay_groups(model))
    assert sorted(found["decay"]) == sorted(UNUSUAL)
    assert set(found["no_decay"]) == {name for name, _ in model.named_parameters()} - set(UNUSUAL)
    by_depth = nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.ModuleList([Unusual(), Unusual()])})
    groups = names_in(by_depth, ft.optim.layer_decay_groups(by_depth, lr=0.1, blocks=Unusual))
    assert sorted(groups["blocks.1"]) == sorted(f"blocks.1.{name}" for name in UNUSUAL)


@pytest.mark.slow
def test_mambas_logarithms_are_not_decayed():
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16, state_size=4)
    model = transformers.MambaForCausalLM(config)
    decayed = names_in(model, ft.optim.decay_groups(model))["decay"]
    assert [name.rpartition("mixer.")[2] for name in decayed] == [
        "conv1d.weight", "in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"
    ]  # fmt: skip


def test_a_tied_weight_is_listed_once_and_spared_as_an_embedding():
    model = TinyLM()
    listed = [p for group in ft.optim.decay_groups(model) for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))
    assert "embed.weight" in names_in(model, ft.optim.decay_groups(model))["no_decay"]
    tied = HeadFirst(tied=True)  # its head is listed before the embedding
    assert "lm_head.weight" in names_in(tied, ft.optim.decay_groups(tied))["no_decay"]
    free = HeadFirst()
    assert "lm_head.weight" in names_in(free, ft.optim.decay_groups(free))["decay"]


def test_frozen_parameters_are_excluded_unless_requested():
    model = TinyLM()
    model.blocks[0].requires_grad_(False)
    found = names_in(model, ft.optim.decay_groups(model))
    assert not [name for names in found.values() for name in names if "blocks.0." in name]
    every = ft.optim.decay_groups(model, frozen=True)
    assert sum(len(group["params"]) for group in every) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="all its parameters are frozen"):
        ft.optim.decay_groups(model.requires_grad_(False))


def test_one_log_line_names_the_undecayed_matrices():
    with heard() as said:
        ft.optim.decay_groups(Vision(), 0.123)
    (line,) = [line for line in said if "decay_groups" in line]
    assert "0.123 on 4 parameters, none on 7, including cls_token, pos_embed" in line


def test_given_names_override_the_rules():
    model = TinyLM()
    found = names_in(model, ft.optim.decay_groups(model, decayed="embed.weight", spared="blocks.*.up.*"))
    assert "embed.weight" in found["decay"]
    assert not [name for name in found["decay"] if ".up." in name]
    assert [name for name in found["decay"] if ".down." in name]
    both = names_in(model, ft.optim.decay_groups(model, decayed="**.bias", spared=["blocks.0.up.bias"]))
    assert "blocks.0.up.bias" in both["no_decay"]
    assert "blocks.1.up.bias" in both["decay"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_decay": -0.1}, r"weight_decay=-0.1\): it must be at least 0"),
        ({"decayed": "embeds"}, "decayed='embeds': no trainable parameter has this name.*embed.weight"),
        ({"spared": ["nothing.*"]}, r"spared='nothing\.\*'"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        ft.optim.decay_groups(TinyLM(), **settings)
