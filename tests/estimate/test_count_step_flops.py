"""Counted FLOPs are those of closed forms, and each part of their difference from 6 N is counted by hand."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.estimate import count_parameters_by_part, count_step_flops, palm_flops_per_token
from lightning_fasttrain.estimate.flops import AttentionShape
from lightning_fasttrain.memory import count_flops

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 8, 16, 50
IDS = torch.zeros(ROWS, LENGTH, dtype=torch.long)
GPT = GPTConfig(VOCABULARY, context=LENGTH, layers=2, heads=4, width=WIDTH)


class Model(nn.Module):
    """An embedding, attention of two heads, and a head; the options are what a part of the difference is about."""

    def __init__(self, tied=False, repeats=1, frozen=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight
        self.qkv.requires_grad_(not frozen)
        self.repeats = repeats

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(self.repeats):
            q, k, v = self.qkv(x).view(*ids.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.norm(x))


def mean(net, ids):
    return net(ids).mean()


def counted(**options):
    flops = count_step_flops(Model(**options), IDS, loss=mean)
    assert flops.six_n + sum(flops.parts().values()) == flops.counted
    assert flops.counted == count_flops(Model(**options), IDS, loss=mean)
    return flops


def test_each_part_is_what_it_says():
    flops, tokens = counted(), ROWS * LENGTH
    assert flops.tokens == tokens
    assert flops.lookups == -6 * tokens * VOCABULARY * WIDTH
    assert flops.others == -6 * tokens * (2 * WIDTH + VOCABULARY)
    assert flops.attention == 3 * 2 * (2 * tokens * LENGTH * WIDTH)
    assert flops.reused == flops.not_needed == 0
    assert (flops.hidden_width, flops.vocabulary) == (WIDTH, VOCABULARY)


def test_a_tied_embedding_is_multiplied():
    flops = counted(tied=True)
    assert flops.lookups == flops.reused == 0
    assert flops.parameters == counted().parameters - VOCABULARY * WIDTH


def test_a_layer_that_runs_twice_counts_twice():
    assert counted(repeats=2).reused == 6 * ROWS * LENGTH * 3 * WIDTH * WIDTH


def test_a_frozen_weight_has_no_gradient():
    assert counted(frozen=True).not_needed == -2 * ROWS * LENGTH * 3 * WIDTH * WIDTH


def test_a_convolution_uses_its_weight_at_each_place():
    net, images = nn.Conv2d(3, 5, kernel_size=3, padding=1, bias=False), torch.zeros(4, 3, 8, 8)
    flops = count_step_flops(net, images, loss=mean)
    assert (flops.unit, flops.tokens) == ("sample", 4)
    assert flops.reused == (64 - 1) * 6 * 4 * 5 * 3 * 9
    assert flops.counted == 2 * (2 * 4 * 64 * 5 * 3 * 9)  # the gradient of the images is not needed


@pytest.mark.parametrize("attention", ["sdpa", "naive"])
def test_a_gpt_has_the_flops_of_palms_formula(attention):
    flops = count_step_flops(GPTModule(dataclasses.replace(GPT, attention=attention)), (IDS, IDS))
    shape = flops.shape
    assert shape is not None
    assert shape == AttentionShape(layers=2, heads=4, head_width=WIDTH // 4, context=LENGTH)
    expected = palm_flops_per_token(flops.multiplied, shape.layers, shape.heads, shape.head_width, shape.context)
    assert flops.flops_per_token == expected


def test_recomputation_is_counted_beside():
    plain = count_step_flops(GPTModule(GPT), (IDS, IDS))
    flops = count_step_flops(GPTModule(GPT), (IDS, IDS), techniques=[ft.ActivationCheckpointing()])
    assert (flops.counted, plain.recomputed) == (plain.counted, 0)
    # Of a block's forward all but the last product, whose result no backward needs.
    weights, attention = 8 * WIDTH**2, 2 * LENGTH * WIDTH
    assert flops.recomputed == 2 * flops.tokens * GPT.layers * (weights + attention)


def test_adapters_change_the_count_itself():
    plain = count_step_flops(GPTModule(GPT), (IDS, IDS))
    techniques = [ft.LoRA(rank=2, targets="up"), ft.ActivationCheckpointing()]
    flops = count_step_flops(GPTModule(GPT), (IDS, IDS), techniques=techniques)
    assert flops.parameters == plain.parameters + GPT.layers * 2 * (WIDTH + 4 * WIDTH)
    # Frozen weights have no gradient, nor has what lies below the first adapter.
    assert flops.not_needed < -2 * flops.tokens * (plain.multiplied - 8 * WIDTH**2)
    assert flops.six_n + sum(flops.parts().values()) == flops.counted
    assert flops.recomputed > 0


def test_the_report_leads_from_6_n_to_the_count():
    text = str(counted())
    assert "6 N, N = 2,450" in text
    assert "embeddings are looked up" in text
    assert "counted by torch" in text


def test_parameters_add_up_by_part():
    net = GPTModule(dataclasses.replace(GPT, width=128))
    parts = count_parameters_by_part(net)
    assert sum(parts.values()) == sum(parameter.numel() for parameter in net.parameters())
    assert parts["gpt.blocks.*.up"] == GPT.layers * (4 * 128 * 128 + 4 * 128)
    assert parts["gpt.tokens"] == VOCABULARY * 128  # tied with the head
    assert parts["others"] == (4 * GPT.layers + 2) * 128  # norms


def test_a_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="holds no tensor with samples"):
        count_step_flops(nn.Linear(1, 1), {}, loss=mean)
