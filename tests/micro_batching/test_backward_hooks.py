"""Hooks around the backward see what the unsplit run shows them: the whole gradient, once a batch."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fasttrain as ft
from tests.support.nets import trainer, weights

GENERATOR = torch.Generator().manual_seed(0)
LOADER = DataLoader(
    TensorDataset(torch.randn(32, 4, generator=GENERATOR).double(), torch.randn(32, generator=GENERATOR).double()), 8
)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.calls = nn.Linear(4, 1).double(), []

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Clips(Net):
    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Decays(Net):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.3).mul_(0.5)


class Logs(Net):
    def on_after_backward(self):
        self.log("norm", self.net.weight.grad.norm())


class Counts(Net):
    def on_before_backward(self, loss):
        self.calls.append("before")
        assert all(parameter.grad is None for parameter in self.parameters())

    def on_after_backward(self):
        self.calls.append("after")


class Signs(L.Callback):
    """A user's callback that replaces the gradient by its sign."""

    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.sign_()


def run(kind, callbacks, **settings):
    module = kind()
    used = trainer(callbacks, **settings)
    used.fit(module, LOADER)
    return weights(module), {name: float(value) for name, value in used.callback_metrics.items()}, module.calls


def assert_same(one, other):
    for name, value in one[0].items():
        torch.testing.assert_close(other[0][name], value, rtol=1e-12, atol=1e-12)
    assert other[1] == pytest.approx(one[1], rel=1e-12)
    assert other[2] == one[2]


@pytest.mark.parametrize("technique", [ft.MicroBatching(4), ft.MicroBatching(3), ft.MicroBatching("auto")], ids=str)
@pytest.mark.parametrize("kind", [Clips, Decays, Logs, Counts], ids=lambda kind: kind.__name__)
def test_hooks_of_the_module_act_once_on_the_whole_gradient(kind, technique):
    assert_same(run(kind, []), run(kind, [technique]))


def test_hooks_of_a_callback_act_once_on_the_whole_gradient():
    assert_same(run(Net, [Signs()]), run(Net, [Signs(), ft.MicroBatching(4)]))


@pytest.mark.parametrize("kind", [Net, Logs], ids=lambda kind: kind.__name__)
def test_hooks_work_over_accumulated_batches(kind):
    plain = run(kind, [], accumulate_grad_batches=2)
    assert_same(plain, run(kind, [ft.MicroBatching(4)], accumulate_grad_batches=2))


def test_no_hook_is_left_replaced():
    module, callback = Counts(), Signs()
    trainer([callback, ft.MicroBatching(4)]).fit(module, LOADER)
    assert not [name for name in (*vars(module), *vars(callback)) if name.endswith("_backward")]


class OwnBackward(Net):
    def backward(self, loss):
        loss.backward()
        self.calls.append("backward")


def test_an_overridden_backward_is_refused_where_it_would_run_on_parts():
    with pytest.raises(ValueError, match=r"MicroBatching with OwnBackward\.backward: .* for each micro-batch"):
        run(OwnBackward, [ft.MicroBatching(4)])
    assert_same(run(OwnBackward, []), run(OwnBackward, [ft.MicroBatching(1)]))
    assert_same(run(OwnBackward, []), run(OwnBackward, [ft.MicroBatching(4, through="net")]))
    assert len(run(OwnBackward, [ft.MicroBatching(4, check=False)])[2]) == 16
