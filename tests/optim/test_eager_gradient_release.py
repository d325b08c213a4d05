"""No gradient is in memory during a forward."""

import pytest
import torch

import lightning_fasttrain as ft
from tests.support.nets import Gradients, TinyLM, fit, gradients, largest_difference, lm_batches, weights


class Watching(TinyLM):
    """Counts the gradients in memory during its forward."""

    def training_step(self, batch, batch_idx):
        self.alive = [*getattr(self, "alive", []), len(gradients(self))]
        return super().training_step(batch, batch_idx)


def test_gradients_are_none_during_the_forward():
    plain, ours = fit(Watching(), lm_batches(3)), fit(Watching(), lm_batches(3), [ft.EagerGradientRelease()])
    assert plain.alive[1] > 0  # what Lightning does by itself
    assert ours.alive == [0, 0, 0]
    assert largest_difference(weights(plain), weights(ours)) == 0


def test_gradients_that_are_being_accumulated_stay():
    settings = {"accumulate_grad_batches": 2}
    seen, released = Gradients(), Gradients()
    fit(Watching(), lm_batches(5), [seen], **settings)
    ours = fit(Watching(), lm_batches(5), [ft.EagerGradientRelease(), released], **settings)
    assert [alive > 0 for alive in ours.alive] == [False, True, False, True, False]
    assert max(map(largest_difference, seen.seen, released.seen)) == 0


def test_sparse_gradients_are_released():
    table = torch.nn.Embedding(9, 3, sparse=True)
    table(torch.tensor([1, 2, 2])).sum().backward()
    assert ft.release_gradients_(table.parameters()) == 3 * 8 + 3 * 3 * 4  # an index and a row for each look-up
    assert table.weight.grad is None


def test_the_function_returns_the_bytes():
    net = torch.nn.Linear(3, 5)
    net(torch.ones(1, 3)).sum().backward()
    assert ft.release_gradients_(net.parameters()) == (15 + 5) * 4
    assert ft.release_gradients_(net.parameters()) == 0


def test_a_model_instead_of_its_parameters_is_refused():
    with pytest.raises(TypeError, match=r"parameters=<Linear>.*Pass its parameters\(\)"):
        ft.release_gradients_(torch.nn.Linear(2, 2))
