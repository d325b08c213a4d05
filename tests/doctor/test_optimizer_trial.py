"""Optimizers are tried on copies: the user's own keep their parameters, gradients and state."""

import copy

import pytest
import torch
from torch import nn

from lightning_fasttrain.doctor.findings.training_faults import _copy, _could_be_fused
from lightning_fasttrain.doctor.observation.step_records import UpdateRecord


def trained(device="cpu", **settings):
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters()}], **settings
    )
    net(torch.rand(3, 4, device=device)).sum().backward()
    optimizer.step()
    record = UpdateRecord(optimizer)
    record.note_gradients()
    return net, optimizer, record


def test_a_fused_copy_updates_as_the_plain_copy_and_the_original_stays():
    net, optimizer, record = trained(lr=0.01)
    before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    plain, fused = _copy(optimizer, record), _copy(optimizer, record, foreach=None, fused=True)
    for made in (plain, fused):
        made.step()
    for group, other in zip(plain.param_groups, fused.param_groups, strict=True):
        assert group["lr"] == other["lr"]
        for one, two in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(one, two)
    # Momentum of the copied state moves the copies although their gradients are zero.
    assert not torch.equal(plain.param_groups[0]["params"][0], net[0].weight)
    torch.testing.assert_close([net.state_dict(), optimizer.state_dict()], before, rtol=0, atol=0)


def test_only_plain_optimizers_of_torch_are_tried():
    assert _could_be_fused(trained(lr=0.01)[2])
    assert not _could_be_fused(trained(lr=0.01, fused=True)[2])
    parameter = nn.Parameter(torch.ones(2))
    assert not _could_be_fused(UpdateRecord(torch.optim.RMSprop([parameter])))


@pytest.mark.gpu
def test_the_fused_copy_counts_its_steps_on_the_gpu():
    _, optimizer, record = trained("cuda", lr=0.01, foreach=False)
    fused = _copy(optimizer, record, fused=True)
    fused.step()
    assert {state["step"].device.type for state in fused.state.values()} == {"cuda"}
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
