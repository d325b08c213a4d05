"""The tanh of a GELU is computed by a sigmoid in compiled code on a CPU, as exactly as a tanh; no other tanh is."""

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers.activations import FastGELUActivation, NewGELUActivation

import lightning_fasttrain as ft
from lightning_fasttrain.model.compile.joint_passes import replace_tanh_of_gelu

SMALL = torch.logspace(-12, 0, 1_000)
VALUES = torch.cat([torch.linspace(-12, 12, 20_001), SMALL, -SMALL])
TANH = torch.ops.aten.tanh.default


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def with_gradient(function, x):
    x = x.detach().requires_grad_()
    output = function(x)
    return output, torch.autograd.grad(output, x, torch.ones_like(output))[0]


def graph_of(function, x):
    """The graph of a function and its gradient, in the operations that the compiler sees."""
    return make_fx(lambda x: with_gradient(function, x), decomposition_table=select_decomp_table())(x)


def count_tanh(graph):
    return len(graph.find_nodes(op="call_function", target=TANH))


@pytest.mark.parametrize("function", [tanh_gelu, NewGELUActivation(), FastGELUActivation()])
def test_a_gelu_and_its_gradient_are_those_of_a_tanh(function):
    made = graph_of(function, VALUES)
    assert count_tanh(made.graph) > 0
    replace_tanh_of_gelu(made.graph)
    made.graph.lint()
    made.recompile()
    assert count_tanh(made.graph) == 0
    expected = with_gradient(function, VALUES.double())
    for mine, exact in zip(made(VALUES), expected, strict=True):
        assert (mine - exact).abs().max() < 20 * torch.finfo(torch.float32).eps  # those of torch's own are up to 9


@pytest.mark.parametrize(
    "function",
    [
        torch.tanh,
        lambda x: 2 + x.tanh(),
        lambda x: x.tanh() - 1,
        lambda x: torch.add(x.tanh(), 1, alpha=2),
        lambda x: x.tanh().square(),
        lambda x: (x.tanh() + 1) * x.tanh().sum(),
    ],
)
def test_a_tanh_whose_small_values_count_stays(function):
    made = graph_of(function, VALUES)
    replace_tanh_of_gelu(made.graph)
    assert count_tanh(made.graph) > 0


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64, "meta"])
def test_a_tanh_in_another_dtype_or_on_another_device_stays(other):
    made = graph_of(lambda x: x.tanh() + 1, VALUES.to(other))
    replace_tanh_of_gelu(made.graph)
    assert count_tanh(made.graph) == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(tanh_gelu(self.up(x)))


def test_compiled_and_recomputed_blocks_use_it(monkeypatch):
    net = nn.Sequential(Block(), Block())
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    seen = []

    def replace(graph):
        before = count_tanh(graph)
        replace_tanh_of_gelu(graph)
        seen.append((before, count_tanh(graph)))

    monkeypatch.setattr("lightning_fasttrain.model.compile.joint_passes.replace_tanh_of_gelu", replace)
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        ft.apply(net, [ft.ActivationCheckpointing(), ft.CompileBlocks(check=False)]),
    ):
        gradients = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    assert (2, 0) in seen
    for mine, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
