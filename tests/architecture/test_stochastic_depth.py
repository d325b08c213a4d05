"""Blocks are skipped by the published formulas, really skipped by batch, and refused where they are not residual."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from tests.support.nets import DIM, Block, TinyLM, fit, gradients, lm_batches, same, weights

BATCHES = lm_batches(3)


def drawn(x, rate, mode):
    """``torchvision.ops.stochastic_depth`` of a residual branch, written down: the factor of the branch."""
    survival_rate = 1.0 - rate
    size = [x.shape[0]] + [1] * (x.ndim - 1) if mode == "row" else [1] * x.ndim
    noise = torch.empty(size, dtype=x.dtype).bernoulli_(survival_rate)
    if survival_rate > 0.0:
        noise.div_(survival_rate)
    return noise


class Residual(nn.Module):
    def __init__(self, rectify=False):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.rectify, self.calls = rectify, 0

    def forward(self, x):
        self.calls += 1
        total = x + self.branch(x)
        return F.relu(total) if self.rectify else total


def stack(depth=3, **settings):
    torch.manual_seed(0)
    return nn.Sequential(*[Residual(**settings) for _ in range(depth)])


def by_formula(net, x, rate, mode):
    for number, block in enumerate(net, start=1):
        total = x + drawn(x, rate * number / len(net), mode) * block.branch(x)
        x = F.relu(total) if block.rectify else total
    return x


@pytest.mark.parametrize("mode", ["row", "batch"])
@pytest.mark.parametrize("rectify", [False, True])
def test_outputs_and_gradients_are_those_of_the_published_formula(mode, rectify):
    net, x = stack(rectify=rectify), torch.rand(5, 2, 4)
    ft.architecture.stochastic_depth_(net, 0.6, mode=mode)
    net(x)  # with the trial of each block, which leaves no trace
    for seed in range(12):
        net.zero_grad()
        torch.manual_seed(seed)
        output = net(x)
        output.square().sum().backward()
        found = gradients(net)
        net.zero_grad()
        torch.manual_seed(seed)
        expected = by_formula(net, x, 0.6, mode)
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients(net).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_block_survives_with_a_probability_linear_in_its_depth():
    net, x = stack(depth=4), torch.rand(1, 4)
    ft.architecture.stochastic_depth_(net, 0.8, mode="batch")
    net(x)
    for block in net:
        block.calls = 0
    for _ in range(2000):
        net(x)
    survived = torch.tensor([block.calls / 2000 for block in net])
    torch.testing.assert_close(survived, torch.tensor([0.8, 0.6, 0.4, 0.2]), rtol=0, atol=0.04)


def test_a_skipped_block_is_not_computed_and_has_gradients_of_zero():
    net, x = stack(depth=1), torch.rand(3, 4, requires_grad=True)
    ft.architecture.stochastic_depth_(net, 1.0, mode="batch", blocks=Residual)
    net(x)
    net[0].calls = 0
    output = net(x)
    output.sum().backward()
    assert net[0].calls == 0
    assert torch.equal(output, x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(gradient.count_nonzero() == 0 for gradient in gradients(net).values())
    assert len(gradients(net)) == len(list(net.parameters()))


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_evaluation_is_bitwise_that_of_the_model(mode):
    net, x = stack(), torch.rand(5, 4)
    expected = net.eval()(x)
    ft.architecture.stochastic_depth_(net, 1.0, mode=mode)
    assert torch.equal(net(x), expected)


def test_undo_restores_the_forward_and_a_second_call_does_nothing():
    net = stack()
    undos = ft.architecture.stochastic_depth_(net, 0.5)
    again = ft.architecture.stochastic_depth_(net, 0.5)
    assert list(again) == list(undos) == ["0", "1", "2"]
    for undo in [*again.values(), *undos.values()]:
        undo()
    assert not any("forward" in vars(block) for block in net)


@pytest.mark.parametrize("mode", ["row", "batch"])
@pytest.mark.parametrize("outside", [True, False])
def test_recomputation_draws_the_same_blocks(mode, outside):
    def run(recomputed):
        torch.manual_seed(0)
        net = TinyLM(dropout=0.3)
        if recomputed and not outside:
            ft.checkpoint_activations_(net)
        ft.architecture.stochastic_depth_(net, 0.7, mode=mode)
        if recomputed and outside:
            ft.checkpoint_activations_(net)
        found = []
        for seed in range(6):
            torch.manual_seed(seed)
            net.zero_grad()
            net.loss(BATCHES[0]).backward()
            found.append(gradients(net))
        return found

    assert all(map(same, run(recomputed=False), run(recomputed=True)))


def test_of_a_tuple_the_other_outputs_are_none():
    net = nn.Sequential(Block())
    ft.architecture.stochastic_depth_(net, 1.0, mode="batch", blocks=Block)
    x = torch.rand(2, 3, DIM)
    output = net[0](x, scale=0.5)
    assert torch.equal(output[0], x)
    assert output[1:] == (None,)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_blocks_are_skipped(compiled_first):
    torch._dynamo.reset()
    net = TinyLM()
    if compiled_first:
        ft.compile_blocks_(net, backend="aot_eager")
    ft.architecture.stochastic_depth_(net, 1.0, mode="batch", blocks="blocks.0")
    if not compiled_first:
        ft.compile_blocks_(net, backend="aot_eager")
    net.loss(BATCHES[0]).backward()
    plain = TinyLM()
    plain.blocks = plain.blocks[1:]
    expected = plain.loss(BATCHES[0])
    net.zero_grad()
    loss = net.loss(BATCHES[0])
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert gradients(net)["blocks.0.up.weight"].count_nonzero() == 0


class Widens(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))

    def forward(self, x):
        return self.layers(x)


class WritesIntoInput(Residual):
    def forward(self, x):
        return x.add_(self.branch(x.clone()))


class Plain(Residual):
    def forward(self, x):
        return self.branch(x) * 2 - x  # it subtracts its input


def test_a_model_may_write_into_the_output_of_a_skipped_block():
    net, x = nn.Sequential(Residual(), Residual()), torch.randn(3, 4)
    ft.architecture.stochastic_depth_(net, 1.0, mode="batch", blocks=["1"])
    hidden = net[0](x)
    kept = hidden.detach().clone()
    written = net[1](hidden)
    written[:, 0] = 0.0
    written.sum().backward()
    assert torch.equal(hidden, kept)
    assert torch.equal(written[:, 1:], kept[:, 1:])
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_parameters_that_a_block_does_not_use_get_no_gradient_where_it_is_skipped():
    """A gradient of zero would let an optimizer's weight decay act on them."""
    net = nn.Sequential(Residual(), Residual())
    net[1].idle = nn.Parameter(torch.ones(2))
    ft.architecture.stochastic_depth_(net, 1.0, mode="batch", blocks=["1"])
    net(torch.randn(3, 4)).sum().backward()
    assert net[1].idle.grad is None
    assert all(not parameter.grad.any() for parameter in net[1].branch.parameters())


def test_the_trial_of_a_block_leaves_its_attributes_as_they_were():
    class Remembers(Residual):
        def forward(self, x):
            self.last = self.branch(x)
            return x + self.last

    net = nn.Sequential(Residual(), Remembers())
    ft.architecture.stochastic_depth_(net, 1.0, mode="batch", blocks=["1"])
    net(torch.randn(3, 4))
    assert not hasattr(net[1], "last")


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Widens, r"output has shape \(3, 6\) for an input of shape \(3, 4\)"),
        (lambda: nn.TransformerEncoderLayer(4, 2, dim_feedforward=8), "not a sum of its input"),
        (Plain, "not a sum of its input"),
        (WritesIntoInput, "it writes into its input in place"),
    ],
)
def test_a_block_that_is_not_residual_is_refused_by_name(block, why):
    net = nn.Sequential(Residual(), block())
    ft.architecture.stochastic_depth_(net, 0.1, blocks=["0", "1"])
    with pytest.raises(ValueError, match=f"block '1' .* is not residual: .*{why}.*skip="):
        net(torch.rand(3, 4))


def test_a_block_without_hidden_states_is_refused_by_name():
    net = nn.Sequential(*[nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    ft.architecture.stochastic_depth_(net, 0.1, blocks=["0"])
    with pytest.raises(ValueError, match="block '0' .* none of the block's arguments is a tensor of floats"):
        net[0](torch.zeros(2, dtype=torch.long))


def test_relu_after_a_sum_with_a_negative_input_is_refused():
    net = stack(rectify=True)
    ft.architecture.stochastic_depth_(net, 0.1)
    with pytest.raises(ValueError, match="relu to the sum, and its input has negative values"):
        net(-torch.rand(3, 4))


def test_skip_leaves_blocks_as_they_are():
    net = stack()
    assert list(ft.architecture.stochastic_depth_(net, 0.5, skip="0")) == ["1", "2"]
    with pytest.raises(ValueError, match="matches all 3 blocks"):
        ft.architecture.stochastic_depth_(stack(), skip=Residual)


def test_the_trial_leaves_random_state_and_buffers_as_they_were():
    net = nn.Sequential(*[Residual() for _ in range(2)])
    for block in net:
        block.branch = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    ft.architecture.stochastic_depth_(net, 0.5, mode="batch")
    torch.manual_seed(3)
    net(torch.rand(3, 4))
    after = torch.rand(1)
    torch.manual_seed(3)
    net(torch.rand(3, 4))
    assert torch.equal(after, torch.rand(1))
    assert int(net[0].branch[1].num_batches_tracked) <= 2


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_micro_batches_draw_their_own(mode):
    calls, net = [], TinyLM()
    net.blocks[2].up.register_forward_hook(lambda *_: calls.append(1))
    depth = ft.architecture.StochasticDepth(0.5, mode=mode)
    fit(net, BATCHES, [depth, ft.MicroBatching(3, trim_padding=False)])
    assert not same(weights(net), weights(TinyLM()))
    assert calls


def test_by_batch_it_is_refused_with_sharded_parameters():
    for mode, refused in (("batch", True), ("row", False)):
        both = [ft.architecture.StochasticDepth(0.1, mode=mode)]
        strategy = ft.FSDP2Strategy()
        if refused:
            with pytest.raises(ValueError, match="each rank would skip other blocks"):
                ft.technique.check_together(both, strategy)
        else:
            ft.technique.check_together(both, strategy)


def test_by_row_it_is_refused_where_blocks_run_as_one_row():
    row, batch = (ft.architecture.StochasticDepth(0.1, mode=mode) for mode in ("row", "batch"))
    with pytest.raises(ValueError, match="tokens of all samples as one row"):
        ft.technique.check_together([row, ft.micro_batching.PaddingFree()])
    ft.technique.check_together([batch, ft.micro_batching.PaddingFree()])
    ft.technique.check_together([row, ft.MicroBatching(2)])
