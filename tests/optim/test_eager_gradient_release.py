"""No gradient is in memory during a forward."""

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from tests.support.nets import (
    Gradients,
    TinyLM,
    as_loader,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    trainer,
    weights,
)


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
    assert ft.optim.release_gradients_(table.parameters()) == 3 * 8 + 3 * 3 * 4  # an index and a row for each look-up
    assert table.weight.grad is None


def test_the_function_returns_the_bytes():
    net = torch.nn.Linear(3, 5)
    net(torch.ones(1, 3)).sum().backward()
    assert ft.optim.release_gradients_(net.parameters()) == (15 + 5) * 4
    assert ft.optim.release_gradients_(net.parameters()) == 0


def test_a_model_instead_of_its_parameters_is_refused():
    with pytest.raises(TypeError, match=r"parameters=<Linear>.*Pass its parameters\(\)"):
        ft.optim.release_gradients_(torch.nn.Linear(2, 2))


class Adversarial(L.LightningModule):
    """Two networks with an optimizer each, of which one takes a step every third batch, under manual optimization."""

    def __init__(self, zero):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.other, self.zero = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1), zero
        self.automatic_optimization, self.left = False, []

    def training_step(self, batch, batch_idx):
        often, seldom = self.optimizers()
        self.left.append([p.grad is not None for p in self.parameters()])
        self.toggle_optimizer(often)
        self.manual_backward(self.other(self.net(batch)).square().mean())
        often.step()
        if self.zero == "after":
            often.zero_grad()
        self.untoggle_optimizer(often)
        self.manual_backward(self.other(self.net(batch).detach()).sum() / 3)
        if (batch_idx + 1) % 3 == 0:
            seldom.step()
            if self.zero == "after":
                seldom.zero_grad()
        if self.zero == "before":  # of the next backward, as in loops that look at gradients
            often.zero_grad()
            if (batch_idx + 1) % 3 == 0:
                seldom.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.1)]


@pytest.mark.parametrize("zero", ["after", "before"])
def test_gradients_that_manual_optimization_still_sums_stay(zero):
    batches = list(torch.randn(7, 8, 4, generator=torch.Generator().manual_seed(0)))
    trained = []
    for techniques in ([], [ft.EagerGradientRelease()]):
        module = Adversarial(zero)
        trainer(techniques).fit(module, as_loader(batches))
        trained.append(weights(module))
    assert largest_difference(*trained) == 0


def test_gradients_that_a_manual_step_has_used_are_released():
    class Plain(Adversarial):
        def training_step(self, batch, batch_idx):
            often, seldom = self.optimizers()
            self.left.append([p.grad is not None for p in self.parameters()])
            often.zero_grad()
            seldom.zero_grad()
            self.manual_backward(self.other(self.net(batch)).sum())
            often.step()
            seldom.step()

    module = Plain("")
    trainer([ft.EagerGradientRelease()]).fit(module, as_loader(list(torch.randn(3, 8, 4))))
    assert not any(map(any, module.left))
