"""MuonAdamW against Muon and AdamW separately, and Lion against its formula."""

import functools

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.optim import Lion, MuonAdamW
from tests.support.nets import TinyLM, largest_difference, lm_batches, take_steps, weights

BATCHES = lm_batches(4)


loop = functools.partial(take_steps, batches=BATCHES)


def matrices(net):
    return [p for name, p in net.named_parameters() if name.startswith("blocks.") and p.ndim == 2]


def test_the_combined_optimizer_equals_both_optimizers_bit_for_bit():
    joined, apart = TinyLM(), TinyLM()
    loop(joined, ft.build_optimizer(joined, "muon", lr=0.01, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.95)))
    hidden = set(matrices(apart))
    rest = [p for p in apart.parameters() if p not in hidden]  # norms, biases and the embedding: no decay
    muon = torch.optim.Muon(list(hidden), 0.01, 0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    loop(apart, muon, torch.optim.AdamW(rest, 0.01, betas=(0.8, 0.95), weight_decay=0.0))
    assert largest_difference(weights(apart), weights(joined)) == 0


def test_muon_gets_the_matrices_of_blocks_and_no_others():
    net = TinyLM()
    optimizer = ft.build_optimizer(net, "muon")
    taken = [p for group in optimizer.param_groups if group["muon"] for p in group["params"]]
    assert set(taken) == set(matrices(net))
    assert len(optimizer.param_groups) == 2
    assert all("muon" not in group["name"] for group in optimizer.param_groups if not group["muon"])


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_state_of_other_groups_is_refused(name):
    net = TinyLM()
    other = ft.build_optimizer(net, name, **({"blocks": "blocks.0"} if name == "muon" else {}))
    loop(net, other)
    with pytest.raises(ValueError, match="a state for MuonAdamW"):
        ft.build_optimizer(net, "muon").load_state_dict(other.state_dict())


def test_unsupported_parameters_of_muon_are_refused():
    bias, weight = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"shape \(3,\) in a group for Muon"):
        MuonAdamW([{"params": [bias], "muon": True}])
    with pytest.raises(ValueError, match="without a group for Muon: this would be plain AdamW"):
        MuonAdamW([weight])


def test_lion_matches_its_formula_entry_by_entry():
    start, generator = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4), torch.Generator().manual_seed(2)
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=0.1, betas=(0.7, 0.95), weight_decay=0.3)
    expected, momentum = start.clone(), torch.zeros_like(start)
    for _ in range(6):
        gradient = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        direction = torch.sign(0.7 * momentum + 0.3 * gradient)
        expected = expected - 0.1 * 0.3 * expected - 0.1 * direction
        momentum = 0.95 * momentum + 0.05 * gradient
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], momentum, rtol=1e-12, atol=1e-12)


def test_lion_agrees_with_that_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes")
    ours, theirs = TinyLM(), TinyLM()
    loop(ours, Lion(ours.parameters(), lr=1e-3, weight_decay=0.1))
    loop(theirs, bnb.optim.Lion(theirs.parameters(), lr=1e-3, weight_decay=0.1))
    assert largest_difference(weights(theirs), weights(ours)) < 1e-5


@pytest.mark.parametrize("settings", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_settings_of_lion_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*it must be"):
        Lion([nn.Parameter(torch.zeros(2))], **settings)


def test_lion_refuses_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = Lion(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient: Lion's momentum is dense"):
        optimizer.step()
