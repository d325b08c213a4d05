"""An optimizer in host memory against the same one on the device, here the CPU as well."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import lightning_fasttrain as ft
from lightning_fasttrain.optim import HostOptimizer, optimizer_state_bytes
from lightning_fasttrain.optim.named.build_optimizer import KNOWN
from tests.support.nets import TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights

BATCHES = lm_batches(4)
ABLE = [name for name, row in KNOWN.items() if "offload" not in row.refuses and row.extra != "ao"]


class Offloaded(TinyLM):
    """The tiny language model, with any optimizer, in host memory or not."""

    def __init__(self, name="adamw", offload="cpu"):
        super().__init__()
        more = {"rank": 2} if name == "galore" else {}
        self.recipe = ft.optim.NamedOptimizer(name, lr=0.01, offload=offload, settings=more)

    def configure_optimizers(self):
        optimizer = self.recipe(self)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


@pytest.mark.parametrize("name", ABLE)
def test_it_matches_the_device_bit_for_bit_and_resumes(name, tmp_path):
    if KNOWN[name].extra:
        pytest.importorskip("bitsandbytes")

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    settings = {"max_epochs": 2, "gradient_clip_val": 0.5}
    plain = fit(Offloaded(name, None), BATCHES, **settings)
    away = fit(Offloaded(name), BATCHES, [Save()], **settings)
    assert largest_difference(weights(plain), weights(away)) == 0
    resumed, t = Offloaded(name), trainer(**settings)
    t.fit(resumed, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(plain), weights(resumed)) == 0
    (optimizer,) = t.optimizers
    assert len(optimizer.state) == 0  # so that Lightning does not move its state
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.25


def test_its_checkpoint_has_the_plain_optimizers_format():
    net = TinyLM()
    away = ft.build_optimizer(net, offload="cpu")
    net.loss(BATCHES[0]).backward()
    away.step()
    plain = ft.build_optimizer(net)
    plain.load_state_dict(away.state_dict())
    assert plain.state[net.embed.weight]["step"] == 1
    other = ft.build_optimizer(net, offload="cpu")
    other.load_state_dict(plain.state_dict())
    (first, second) = (each.state_dict()["state"][0]["exp_avg"] for each in (away, other))
    assert torch.equal(first, second)


def load(net, reference):
    net.load_state_dict(reference.state_dict())


def write_data(net, reference):
    """Change weights without a trace in their version, as WGAN's clipping and many averages do."""
    for parameter, other in zip(net.parameters(), reference.parameters(), strict=True):
        parameter.data.copy_(other)


@pytest.mark.parametrize("change", [load, write_data])
def test_weights_changed_between_steps_are_read_again(change):
    net, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    away = HostOptimizer(net.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1))
    net(torch.ones(1, 3)).sum().backward()
    away.step()
    change(net, reference)
    away.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    away.step()
    torch.testing.assert_close(net.weight.detach(), reference.weight.detach() - 0.1)


def test_the_device_holds_none_of_its_state():
    net = Offloaded()
    optimizer = net.recipe(net)
    assert optimizer_state_bytes(optimizer) == optimizer_state_bytes(ft.build_optimizer(net))
    predicted = ft.predict_memory(net, BATCHES[0], device="cuda", optimizer=net.recipe)
    plain = ft.predict_memory(net, BATCHES[0], device="cuda", optimizer=ft.optim.NamedOptimizer("adamw"))
    assert plain.at_peak["optimizer state"] > predicted.at_peak.get("optimizer state", 0) == 0
    assert plain.peak_bytes > predicted.peak_bytes


@pytest.mark.gpu
def test_on_a_gpu_state_and_step_stay_in_host_memory():
    plain, away = TinyLM().cuda(), TinyLM().cuda()
    optimizers = ft.build_optimizer(plain, fused=False, foreach=False), ft.build_optimizer(away, offload="cpu")
    for batch in BATCHES:
        moved = {key: value.cuda() for key, value in batch.items()}
        for net, optimizer in zip((plain, away), optimizers, strict=True):
            optimizer.zero_grad()
            net.loss(moved).backward()
            optimizer.step()
    assert largest_difference(weights(plain), weights(away)) < 1e-4
    states = optimizers[1].inner.state.values()
    assert {value.device.type for state in states for value in state.values()} == {"cpu"}
