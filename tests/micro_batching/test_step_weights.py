"""Weights of micro-batches follow the formula, also with a count of 0 or a loss in half precision."""

import math

import pytest
import torch

from lightning_fasttrain.micro_batching.normalizer.step_weights import MicroBatchWeights, add_counts


def as_tensors(counts):
    return [torch.tensor(count) for count in counts]


@pytest.mark.parametrize("kind", [list, as_tensors])
def test_losses_and_gradients_are_weighted_by_their_share(kind):
    counts = kind([1, 2, 5])
    weights = MicroBatchWeights(counts, add_counts(counts))
    losses = [torch.tensor(value, requires_grad=True) for value in (8.0, 4.0, 1.6)]
    weighted = [weights.scale_loss(loss, part) for part, loss in enumerate(losses)]
    torch.stack(weighted).sum().backward()
    assert [loss.item() for loss in weighted] == pytest.approx([1.0, 1.0, 1.0])
    assert [loss.grad.item() for loss in losses] == [0.125, 0.25, 0.625]
    assert weights.add_up(losses).item() == pytest.approx(3.0)


@pytest.mark.parametrize("counts", [[0, 4], [torch.tensor(0), torch.tensor(4)], [torch.tensor(0), 4]])
def test_a_micro_batch_without_targets_gives_exactly_zero(counts):
    weights = MicroBatchWeights(counts, add_counts(counts))
    nothing = torch.tensor(math.nan, requires_grad=True)
    weighted = weights.scale_loss(nothing, 0)
    weighted.backward()
    assert (weighted.item(), nothing.grad.item()) == (0.0, 0.0)
    assert weights.add_up([nothing, torch.tensor(3.0)]).item() == 3.0
    assert MicroBatchWeights([torch.tensor(0)], torch.tensor(0)).add_up([nothing]).item() == 0.0


def test_a_nan_loss_stays_nan():
    for counts in ([1, 1], [torch.tensor(1), torch.tensor(1)]):
        assert math.isnan(MicroBatchWeights(counts, 2).scale_loss(torch.tensor(math.nan), 1).item())


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("kind", [list, as_tensors])
def test_a_third_is_not_rounded_to_half_precision(kind, dtype, expected):
    loss = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    weighted = MicroBatchWeights(kind([1, 2]), 3).scale_loss(loss, 0)
    weighted.backward()
    assert weighted.dtype is expected
    assert weighted.item() == pytest.approx(1 / 3, rel=1e-7)
    assert loss.grad.dtype is dtype


def test_the_remaining_micro_batches_share_the_total():
    weights = MicroBatchWeights([1, 2, 5], 8)
    assert weights.select([0, 2]).add_up([torch.tensor(6.0), torch.tensor(0.0)]).item() == pytest.approx(1.0)
    assert weights.select([0, 1, 2]) is weights


def test_counts_of_all_types_are_added():
    assert add_counts([]) == 0  # no micro-batch had a loss
    assert add_counts([1, 2.5]) == 3.5
    assert add_counts([torch.tensor(1), torch.tensor(2)]).item() == add_counts([torch.tensor(1), 2]).item() == 3
