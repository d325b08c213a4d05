"""WeightEMA on two processes, against an average written out in one; one launch serves all tests of shards."""

import json

import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import full_checkpoint
from tests.strategy.average_scenarios import DECAY, RANKS, Gpt, Validated
from tests.strategy.tensor_scenarios import batches_of
from tests.support.nets import as_loader, largest_difference, trainer
from tests.support.ranks import launch_once, run_ranks


def fit_alone(net, batches, path=None, epochs=1):
    ema = ft.optim.WeightEMA(DECAY)
    module, t = net(), trainer([ema], max_epochs=epochs)
    t.fit(module, as_loader(batches), ckpt_path=path)
    return module, t, ema


def launch(folder):
    _, t, _ = fit_alone(Validated, RANKS[0])
    t.save_checkpoint(folder / "one.ckpt")
    run_ranks("tests.strategy.shard_scenarios", folder / "found.json", folder, log=folder / "log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launch_once(tmp_path_factory, "shards", launch)


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("measured", ["weights", "average", "validated", "validated checkpoint", "tensor group"])
def test_averages_in_shards_equal_those_of_one_process(found, measured):
    assert all(rank["moved"] > 1e-3 for rank in found)
    assert all(rank[measured] < 1e-6 for rank in found)


def test_each_rank_holds_its_shards_of_the_average(found):
    (first, everything), (second, _) = (rank["held"] for rank in found)
    assert first + second == everything
    assert first != second  # 17 rows of the embedding


@pytest.mark.parametrize("mesh", ["same", "hybrid"])
def test_a_resumed_run_has_the_same_weights_and_averages_bit_for_bit(found, mesh):
    assert all(rank[f"resumed {mesh}"] == [0, 0] for rank in found)


def test_one_process_and_shards_resume_each_others_averages(found, folder):
    module, _, ema = fit_alone(Validated, RANKS[0], folder / "one.ckpt", epochs=2)
    ends = {"from one": module.head.weight, "average from one": ema.average["embed.weight"]}
    for measured, expected in ends.items():
        torch.testing.assert_close(torch.tensor(found[0][measured]), expected.detach(), rtol=1e-5, atol=1e-6)
    checkpoint = full_checkpoint(folder / "from one")
    torch.save(checkpoint, folder / "full.ckpt")
    _, _, again = fit_alone(Validated, RANKS[0], folder / "full.ckpt", epochs=2)
    averaged = ft.optim.averaged_state_dict(checkpoint)
    torch.testing.assert_close(averaged["head.weight"], again.average["embed.weight"], rtol=0, atol=0)


def test_averages_of_a_tensor_group_are_saved_in_plain_names(found, folder):
    assert all(rank["tensor group to shards"] == 0 for rank in found)
    _, _, ema = fit_alone(Gpt, batches_of("gpt", 0, 3))
    averaged = ft.optim.averaged_state_dict(full_checkpoint(folder / "tensor"))
    assert largest_difference(ema.average, {name: averaged[name] for name in ema.average}) < 1e-6


@pytest.mark.parametrize("measured", ["average", "validated", "resumed", "resumed validated"])
def test_averages_in_fabric_equal_those_of_one_process(found, measured):
    assert all(rank[f"fabric {measured}"] < 1e-6 for rank in found)


def test_averages_under_zero_2_equal_those_of_one_process_and_zero_3_is_refused(found):
    assert all(rank["zero average"] < 1e-6 and rank["zero validated"] < 1e-6 for rank in found)
    assert all(rank["zero resumed"] == 0 for rank in found)
    refused = "WeightEMA + ZeROStrategy: each rank holds a shard of them without their shape. Use FSDP2Strategy"
    assert all(refused in rank["zero 3"] for rank in found)
