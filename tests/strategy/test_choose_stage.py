"""The stage that ``ZeROStrategy("auto")`` chooses, from the prediction for one of eight ranks."""

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from lightning_fasttrain import ZeROStrategy
from lightning_fasttrain.strategy.memory_limits import Limits, predict_fits
from lightning_fasttrain.strategy.zero import zero_host
from lightning_fasttrain.strategy.zero.zero_states import STAGES, ZeROSizes, ZeROStage
from tests.support.nets import TinyLM, lm_batches

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

GIB, RANKS = 2**30, 8
SIZES = ZeROSizes(reduce_bucket=1000)


@pytest.fixture(scope="module")
def net():
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(2**12, 2**12, bias=False) for _ in range(16)])


@pytest.fixture(scope="module")
def needs(net):
    """GiB of the device at each stage."""
    stages = {stage: ZeROStage(stage, SIZES) for stage in STAGES[:4]}
    optimizer = torch.optim.AdamW(net.parameters())
    fits = predict_fits(stages, Limits(0, None), net, optimizer=optimizer, device="cpu", world=RANKS)
    return {fit.name: fit.device_bytes / GIB for fit in fits}


def choose(monkeypatch, net, gib, step=None, activation_gib=0.0, headroom=0.0):
    monkeypatch.setattr(zero_host, "rank_count", lambda: RANKS)
    options = {"memory_gib": gib, "headroom": headroom, "activation_gib": activation_gib}
    strategy = ZeROStrategy(**options, reduce_bucket_size=SIZES.reduce_bucket)
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")], LightningEnvironment()
    optimizer = torch.optim.AdamW(net.parameters())
    strategy._choose_stage(net, optimizer, step or {})
    return strategy


@pytest.mark.parametrize("stage", STAGES[:4])
def test_the_first_stage_that_fits_is_chosen(stage, needs, net, monkeypatch):
    strategy = choose(monkeypatch, net, needs[stage] + 0.001)
    assert strategy.options.stage == stage
    assert strategy.config["zero_optimization"]["stage"] == int(stage)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == SIZES.reduce_bucket
    assert needs["0"] > needs["1"] > needs["2"] > needs["3"]


def test_headroom_and_activations_are_subtracted_first(needs, net, monkeypatch):
    assert choose(monkeypatch, net, needs["1"] + 0.001, headroom=0.05).options.stage == "2"
    assert choose(monkeypatch, net, needs["1"] + 1.001, activation_gib=1.0).options.stage == "1"
    assert choose(monkeypatch, net, needs["1"] + 0.999, activation_gib=1.0).options.stage == "2"


def test_the_table_and_the_reason_are_printed(needs, net, monkeypatch, capsys):
    choose(monkeypatch, net, needs["3"] + 0.001)
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 ←" in printed
    assert "Stage 3 is the first that fits: " in printed
    assert "stage 2 would be " in printed


def test_a_shortage_has_the_amount_and_a_way_out(net, monkeypatch):
    with pytest.raises(ValueError, match=r"No stage fits, the nearest is .* and lacks .* GiB on each device"):
        choose(monkeypatch, net, 0.0001)


def test_activations_count_unless_the_step_cannot_be_predicted(monkeypatch, caplog):
    batch = lm_batches(1, size=64, length=64)[0]
    net = TinyLM(depth=2)
    alone = choose(monkeypatch, net, 0.0005).options.stage
    assert (alone, choose(monkeypatch, net, 0.02, {"batch": batch}).options.stage) == ("0", "0")
    assert choose(monkeypatch, net, 0.02, {"batch": batch}, activation_gib=1.0).options.stage == "0"
    with pytest.raises(ValueError, match="No stage fits"):
        choose(monkeypatch, net, 0.0005, {"batch": batch})
    choose(monkeypatch, net, 0.0005, {"batch": "not a batch"})
    assert "activations count as activation_gib=0.0, since they cannot be predicted" in caplog.text


def test_a_folder_that_does_not_exist_is_refused(net):
    strategy = ZeROStrategy(memory_gib=1, nvme_path="/no/such/folder")
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")], LightningEnvironment()
    with pytest.raises(ValueError, match="nvme_path='/no/such/folder': there is no such folder"):
        strategy._choose_stage(net, torch.optim.AdamW(net.parameters()), {})
