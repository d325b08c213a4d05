"""Adaptive gradient clipping by units, and weight clipping."""

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.optim import AdaptiveClipping, WeightClipping, clip_adaptively_, clip_weights_
from tests.support.nets import Gradients, TinyLM, fit, largest_difference, lm_batches, sgd

BATCHES = lm_batches(4)


def one_unit(weights, gradient, factor, eps=1e-3):
    """Apply equation 3 of the paper to one unit."""
    largest = factor * max(float(weights.norm()), eps)
    return gradient * largest / gradient.norm() if float(gradient.norm()) > largest else gradient


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2, 2)])
def test_each_unit_is_clipped_by_itself(shape):
    weight = nn.Parameter(torch.randn(shape))
    sizes = torch.tensor([1e-3, 1.0, 10.0]).reshape(-1, *[1] * (len(shape) - 1))
    before = weight.grad = torch.randn(shape) * sizes
    expected = [one_unit(w, g, 0.05) for w, g in zip(weight.detach(), before.clone(), strict=True)]
    clip_adaptively_([weight], 0.05)
    torch.testing.assert_close(weight.grad, torch.stack(expected))
    assert torch.equal(weight.grad[0], expected[0])  # small relative to its weights, so it stays


@pytest.mark.parametrize("shape", [(5,), ()])
def test_a_vector_is_one_unit(shape):
    weight = nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape)
    expected = one_unit(weight.detach(), weight.grad.clone(), 0.05)
    clip_adaptively_([weight], 0.05)
    torch.testing.assert_close(weight.grad, expected)


def test_rows_of_a_sparse_gradient_are_clipped_as_those_of_a_dense_one():
    torch.manual_seed(0)
    ids, factors, gradients = torch.tensor([1, 2, 2, 8]), torch.rand(4, 1), []
    table = torch.randn(9, 3)
    for sparse in (False, True):
        net = nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=sparse)
        (net(ids) * factors).sum().backward()
        assert clip_adaptively_(net.parameters(), 0.05) == 1
        gradients.append(net.weight.grad)
    assert gradients[1].is_sparse
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0])
    weight = nn.Parameter(table)
    weight.grad = torch.eye(9)[:, :3].to_sparse()
    with pytest.raises(ValueError, match="sparse in 2 dimensions: it holds parts of units"):
        clip_adaptively_([weight])


def test_norms_of_float64_are_computed_in_float64():
    weight, bias = nn.Parameter(torch.randn(3, 4).double()), nn.Parameter(torch.randn(3))
    before = weight.grad = torch.randn(3, 4).double()
    bias.grad = torch.zeros(3)
    expected = [one_unit(w, g, 1e-3) for w, g in zip(weight.detach(), before.clone(), strict=True)]
    clip_adaptively_([weight, bias], 1e-3)
    torch.testing.assert_close(weight.grad, torch.stack(expected), rtol=1e-14, atol=0)


def test_zero_gradients_stay_and_zero_weights_can_change():
    zero = nn.Parameter(torch.zeros(2, 2))
    zero.grad = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert clip_adaptively_([zero, nn.Parameter(torch.ones(1))], 0.01, eps=0.1) == 1
    torch.testing.assert_close(zero.grad, torch.tensor([[0.0, 0.0], [0.0006, 0.0008]]))


def test_in_a_run_embeddings_and_excluded_modules_are_not_clipped():
    plain, clipped = Gradients(), Gradients()
    fit(TinyLM(optimizer=sgd), BATCHES[:1], [plain])
    fit(TinyLM(optimizer=sgd), BATCHES[:1], [AdaptiveClipping(1e-3, leave_out="blocks.0.up"), clipped])
    net, untouched = TinyLM(), ("embed.weight", "blocks.0.up.weight", "blocks.0.up.bias")
    parameters = dict(net.named_parameters())
    for name, gradient in plain.seen[0].items():
        parameters[name].grad = gradient.clone()
    clip_adaptively_((p for name, p in parameters.items() if name not in untouched), 1e-3)
    expected = {name: parameter.grad for name, parameter in parameters.items()}
    assert largest_difference(expected, clipped.seen[0]) == 0
    assert largest_difference(plain.seen[0], clipped.seen[0]) > 0.1


def test_weights_are_clipped_after_the_step():
    net = fit(TinyLM(lr=0.5), BATCHES, [WeightClipping(0.3, of="blocks.1")], accumulate_grad_batches=2)
    assert float(net.blocks[1].up.weight.detach().abs().max()) == pytest.approx(0.3)
    assert float(net.blocks[0].up.weight.detach().abs().max()) > 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptiveClipping(0.0), "factor=0.0"),
        (lambda: AdaptiveClipping(eps=-1), "eps=-1"),
        (lambda: WeightClipping(0), "limit=0"),
        (lambda: clip_weights_([torch.ones(1)], 1.0), "none of the parameters is trainable"),
        (lambda: fit(TinyLM(), BATCHES, [AdaptiveClipping(leave_out="haed")]), "leave_out='haed'.*embed, blocks, head"),
        (lambda: fit(TinyLM(), BATCHES, [WeightClipping(1, of="haed")]), "of='haed'.*embed, blocks, head"),
        (lambda: fit(TinyLM(), BATCHES, [AdaptiveClipping(), ft.OptimizerInBackward()]), "used and freed"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
