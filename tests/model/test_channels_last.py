"""Weights of 2-D convolutions are stored channels-last for a run: the same training, restored strides."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.model import ChannelsLast, channels_last_
from lightning_fasttrain.model.kernels.channels_last import match_layout_
from lightning_fasttrain.technique import check_together
from tests.support.nets import TinyLM, as_loader, largest_difference, trainer, weights
from tests.support.ranks import run_code

IMAGES = [(torch.randn(4, 3, 8, 8), torch.randint(2, (4,))) for _ in range(4)]


class ConvNet(L.LightningModule):
    def __init__(self, fused=False):
        super().__init__()
        torch.manual_seed(7)
        self.fused = fused
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, groups=4), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        )
        self.table = nn.Parameter(torch.randn(2, 3, 2, 2))  # four axes, and no weight of a convolution

    def forward(self, x):
        return self.net(x) + 0 * self.table.sum()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


WEIGHTS = ["net.0.weight", "net.3.weight", "net.5.weight"]


def run(callbacks=(), epochs=1, **settings):
    torch.manual_seed(1)
    t = trainer(callbacks, max_epochs=epochs)
    net = ConvNet(settings.pop("fused", False))
    t.fit(net, as_loader(IMAGES), **settings)
    return net, t


def strides(net):
    return {name: value.stride() for name, value in net.state_dict().items()}


def test_only_weights_of_convolutions_change_and_only_their_strides():
    net, plain = ConvNet(), ConvNet()
    undos = channels_last_(net)
    assert list(undos) == WEIGHTS
    changed = [name for name, stride in strides(net).items() if stride != strides(plain)[name]]
    assert changed == WEIGHTS
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in plain.state_dict().items())
    assert net.net(IMAGES[0][0].requires_grad_()).shape == (4, 2)
    assert net.net[0](IMAGES[0][0]).is_contiguous(memory_format=torch.channels_last)
    for undo in undos.values():
        undo()
    assert strides(net) == strides(plain)


def test_applied_twice_is_once_and_the_users_own_layout_stays():
    net = ConvNet()
    net.net[0].to(memory_format=torch.channels_last)
    before = strides(net)
    with ft.apply(net, [ChannelsLast()]):
        once = strides(net)
        with ft.apply(net, [ChannelsLast()]):
            assert strides(net) == once
        assert strides(net) == once != before
    assert strides(net) == before


@pytest.mark.parametrize("fused", [False, True])
def test_training_is_the_same_and_strides_are_restored(fused):
    (plain, _), (ours, _) = run(fused=fused), run([ChannelsLast()], fused=fused)
    assert largest_difference(weights(plain), weights(ours)) < 1e-5
    assert strides(ours) == strides(plain)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("second", [True, False])
def test_a_checkpoint_has_the_usual_layout_and_resumes(fused, second, tmp_path):
    plain, _ = run(epochs=2, fused=fused)

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                assert not pl_module.net[0].weight.is_contiguous()
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    run([ChannelsLast(), Save()], epochs=1, fused=fused)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["state_dict"]["net.0.weight"].is_contiguous()
    moments = [state["exp_avg"] for state in saved["optimizer_states"][0]["state"].values()]
    assert all(moment.is_contiguous() for moment in moments)
    resumed, _ = run([ChannelsLast()] * second, 2, fused=fused, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(plain), weights(resumed)) < 1e-5


def test_states_of_an_optimizer_get_the_layout_of_their_parameters():
    net = ConvNet()
    optimizer = net.configure_optimizers()
    net.training_step(IMAGES[0], 0).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state[net.net[0].weight])
    channels_last_(net)
    assert match_layout_(optimizer) == 2 * len(WEIGHTS)
    state = optimizer.state[net.net[0].weight]
    assert state["exp_avg"].stride() == net.net[0].weight.stride()
    assert torch.equal(state["exp_avg"], before["exp_avg"])
    assert match_layout_(optimizer) == 0


# In a process of its own: what this avoids writes past its memory.
STRIDED = """
import torch
from torch import nn
from lightning_fasttrain.model import channels_last_

torch.manual_seed(1)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 1, stride=2), nn.Conv2d(16, 4, 3))
images = torch.randn(16, 3, 64, 64)
gradients = []
for divided in (False, True):
    undos = channels_last_(net) if divided else {}
    for _ in range(3):
        net.zero_grad()
        net(images).square().mean().backward()
    gradients.append([parameter.grad.clone(memory_format=torch.contiguous_format) for parameter in net.parameters()])
seen = []
net[1].register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].is_contiguous()))
net(images)
for undo in undos.values():
    undo()
net(images.to(memory_format=torch.channels_last))
difference = max((a - b).abs().max() / a.abs().max() for a, b in zip(*gradients)).item()
print(sorted(undos), seen, len(net[1]._forward_pre_hooks), difference < 1e-5)
"""


def test_small_strided_convolutions_whose_gradient_is_faulty_on_a_cpu_stay_as_they_are(tmp_path):
    names = ["0.weight", "1.weight", "2.weight"]
    assert run_code(STRIDED, folder=tmp_path).strip() == f"{names} [True, False] 0 True"


def test_a_model_without_convolutions_is_refused_by_the_function():
    with pytest.raises(ValueError, match=r"channels_last_\(TinyLM\): it has no nn.Conv2d.*Leave it out"):
        channels_last_(TinyLM())


def test_strategies_that_flatten_parameters_are_refused():
    for strategy in (ft.FSDP2Strategy(), ft.ZeROStrategy(stage=1)):
        with pytest.raises(ValueError, match=r"ChannelsLast \+ \w+: sharded parameters are flattened"):
            check_together([ChannelsLast()], strategy)
