import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from examples import reference_models
from lightning_fasttrain.memory import count_flops


def total(net, batch):
    return net(batch).sum()


def test_flops_of_linear_layers():
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    rows = 7
    forward = 2 * rows * (6 * 10 + 10 * 4)
    backward = 2 * rows * (6 * 10 + 2 * 10 * 4)  # the gradient of the batch is not needed
    assert count_flops(net, torch.zeros(rows, 6), loss=total) == forward + backward


def test_frozen_layers_have_no_weight_gradient_flops():
    net = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4))
    net[1].requires_grad_(False)
    assert count_flops(net, torch.zeros(7, 6), loss=total) == 2 * 7 * (2 * 60 + 2 * 40)


def test_attention_of_every_kernel_is_counted():
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.zeros(3, 2, 16, 8, requires_grad=True)  # batch, heads, tokens, width of a head
    product = 2 * 3 * 2 * 16 * 16 * 8
    assert count_flops(Attention(), x, loss=total) == 2 * product + 4 * product


def test_flops_of_convolutions():
    net = nn.Conv2d(3, 5, kernel_size=3, padding=1, bias=False)
    product = 2 * 4 * 8 * 8 * 5 * 3 * 9
    images = torch.zeros(4, 3, 8, 8)
    assert count_flops(net, images, loss=total) == 2 * product


def test_flops_of_a_gpt_match_palms_formula():
    gpt = reference_models.gpt("nano", batch=2)
    module, batch = gpt.module(), gpt.batch()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tokens = next(iter(batch.values()) if isinstance(batch, dict) else iter(batch))
    rows, length = tokens.shape[0], tokens.shape[1]
    matrices = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    blocks, width = _depth_and_width(module)
    expected = 6 * matrices * rows * length + 12 * blocks * width * length * rows * length
    assert abs(count_flops(module, batch) / expected - 1) < 0.01
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def _depth_and_width(module):
    blocks = ft.model.find_blocks(module)
    return len(blocks), next(m.normalized_shape[-1] for m in module.modules() if isinstance(m, nn.LayerNorm))
