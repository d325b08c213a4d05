"""Frozen parameters are not changed by an optimizer, a forward or ``model.train()``; and freezing can be undone."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

from lightning_fasttrain.finetune.selection.freezing import choose, freeze_, freeze_except_, unfreeze_
from tests.support.nets import TinyLM, lm_batches, weights


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    )


def step(net, optimizer, seed=0):
    net(torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # the harder case: with a zero gradient AdamW still decays a weight


def test_frozen_module_is_bitwise_unchanged_while_the_rest_trains():
    net = convnet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    step(net, optimizer)  # so that gradients and optimizer state exist
    freeze_(net[0])
    freeze_(net[1])
    before = weights(net)
    for _ in range(3):
        step(net.train(), optimizer)
    changed = {name for name, value in weights(net).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith(("3.", "4."))}


def test_frozen_norms_stay_in_eval_and_dropout_is_unchanged():
    net = convnet()
    freeze_(net)
    assert [module.training for module in net.train()] == [True, False, True, True, False, True]
    assert [module.training for module in net.eval()] == [False] * 6


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_norms_with_running_statistics_go_to_eval(norm):
    freeze_(norm)
    assert norm.train() is norm
    assert not norm.training


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_norms_without_running_statistics_keep_their_mode(norm):
    freeze_(norm)
    assert norm.training
    assert "train" not in vars(norm)


def test_undo_restores_the_previous_state():
    net = convnet()
    net[3].weight.requires_grad_(False)
    net[4].eval()
    state = [p.requires_grad for p in net.parameters()], [m.training for m in net.modules()]
    undo = freeze_(net)
    assert not any(p.requires_grad for p in net.parameters())
    undo()
    assert state == ([p.requires_grad for p in net.parameters()], [m.training for m in net.modules()])
    assert not any("train" in vars(module) for module in net.modules())


def test_freezing_twice_equals_once():
    net = convnet()
    outer = freeze_(net)
    inner = freeze_(net)
    inner()
    assert not any(p.requires_grad for p in net.parameters())
    assert not net.train()[1].training
    outer()
    assert all(p.requires_grad for p in net.parameters())
    assert net[1].training


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_are_frozen_independently(copied):
    net = convnet()
    undo = freeze_(net)
    twin = copied(net)
    undo()
    assert not twin.train()[1].training
    assert vars(twin[1])["train"].module is twin[1]
    unfreeze_(twin)
    assert twin[1].training
    assert all(p.requires_grad for p in twin.parameters())


def test_keys_of_the_state_dict_are_kept():
    net = convnet()
    keys = list(net.state_dict())
    freeze_(net)
    assert list(net.state_dict()) == keys


def test_unfreezing_names_what_trains_and_norms_follow_what_holds_them():
    net = convnet()
    freeze_(net)
    assert unfreeze_(net) == [name for name, _ in net.named_parameters()]
    assert all(p.requires_grad for p in net.parameters())
    assert net[1].training
    freeze_(net.eval())
    unfreeze_(net)
    assert not net[1].training
    assert net.train()[1].training


def test_quantised_weights_cannot_be_unfrozen():
    bnb = pytest.importorskip("bitsandbytes")
    net = nn.Sequential(bnb.nn.Linear4bit(8, 8, quant_storage=torch.bfloat16), nn.Linear(8, 2)).to("cpu")
    assert net[0].weight.is_floating_point()  # although it is packed
    freeze_(net)
    assert unfreeze_(net) == ["0.bias", "1.weight", "1.bias"]
    assert not net[0].weight.requires_grad


@pytest.mark.parametrize(
    ("keep", "trains"),
    [
        (["1"], {"1.weight", "1.bias"}),
        (["3.weight"], {"3.weight"}),
        (["*.bias"], {"0.bias", "1.bias", "3.bias", "4.bias"}),
        ([nn.BatchNorm2d], {"1.weight", "1.bias", "4.weight", "4.bias"}),
        (["Conv2d", "4"], {"0.weight", "0.bias", "3.weight", "3.bias", "4.weight", "4.bias"}),
        (["*"], {f"{i}.{name}" for i in (0, 1, 3, 4) for name in ("weight", "bias")}),
    ],
)
def test_everything_but_the_named_modules_is_frozen(keep, trains):
    net = convnet()
    assert set(freeze_except_(net, *keep)) == trains
    assert {name for name, p in net.named_parameters() if p.requires_grad} == trains


def test_norms_stay_in_eval_unless_named():
    net = convnet()
    freeze_except_(net, "0", "4", "1.bias")  # only one parameter of the first norm
    assert [net.train()[i].training for i in (1, 4)] == [False, True]


def test_previously_frozen_parameters_of_a_kept_module_stay_frozen():
    net = TinyLM()
    net.blocks[2].up.bias.requires_grad_(False)
    trains = freeze_except_(net, "blocks.2")
    assert trains == [name for name in dict(net.named_parameters()) if "blocks.2" in name and "up.bias" not in name]


def test_tied_parameter_trains_if_one_of_its_names_is_kept(caplog):
    net = TinyLM()
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        assert freeze_except_(net, "head") == ["embed.weight"]
    assert "embed.weight trains, since it is tied to head.weight" in caplog.text


def test_only_named_modules_learn():
    net = TinyLM()
    freeze_except_(net, "blocks.*.norm", "**.bias")
    before = weights(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.loss(lm_batches(1)[0]).backward()
    optimizer.step()
    changed = {name for name, value in weights(net).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".norm." in name or name.endswith("bias")}


def test_pattern_without_a_match_is_refused():
    net = TinyLM()
    with pytest.raises(ValueError, match=r"'blocks.2.nrom' matches nothing in TinyLM.*Similar names: .*blocks.2.norm"):
        freeze_except_(net, "head", "blocks.2.nrom")
    assert all(p.requires_grad for p in net.parameters())


def test_class_without_a_match_is_refused_with_candidates():
    with pytest.raises(ValueError, match="'LSTM' matches nothing.*Linear ×7"):
        freeze_except_(TinyLM(), nn.LSTM)


def test_call_without_names_is_refused():
    with pytest.raises(ValueError, match=r"no module or parameter is named.*freeze_\(model\)"):
        freeze_except_(TinyLM())


def test_entry_of_another_type_is_refused():
    net = TinyLM()
    with pytest.raises(TypeError, match="expected a string or a class of Module, got a Linear. Use its class, Linear"):
        freeze_except_(net, net.head)


def test_naming_only_frozen_parameters_is_refused():
    net = TinyLM()
    freeze_(net.blocks)
    with pytest.raises(ValueError, match="none of the 18 matching parameters requires a gradient"):
        freeze_except_(net, "blocks")
    assert net.embed.weight.requires_grad


def test_module_with_two_names_matches_both():
    net = nn.Module()
    net.one = net.two = nn.BatchNorm1d(3)
    chosen = choose(net, "two")
    assert list(chosen.parameters) == ["two.weight", "two.bias"]
    assert chosen.norms == [net.one]
    assert freeze_except_(net, "two") == ["one.weight", "one.bias"]
    assert net.train().one.training
