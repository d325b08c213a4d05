import dataclasses
import io
import json

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from torch import nn

from lightning_fasttrain.predict import predict_memory
from lightning_fasttrain.strategy.choose_strategy import CANDIDATES, choose_strategy
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer

GIB = 2**30
LAYERS, WIDTH = 64, 2**12  # 2³⁰ parameters


class Layer(nn.Module):
    """A layer with an activation, so that the net consists of blocks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)


def choose(memory_gib, devices=8, net=None, **more):
    if net is None:
        with torch.device("meta"):
            net = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(net.parameters())
    return choose_strategy(net, optimizer, devices, memory_gib=memory_gib, **{"headroom": 0.0, **more})


@pytest.fixture(scope="module")
def large():
    return choose(100)


def of(choice, name):
    return next(candidate for candidate in choice.candidates if candidate.name == name)


def test_ddp_is_chosen_if_it_fits(large):
    assert large.name == "ddp"
    assert [candidate.name for candidate in large.candidates] == list(CANDIDATES)
    states = large.chosen.states
    assert states.device == (4 + 4 + 8 + 4) * GIB + 4 * LAYERS  # buckets of gradients; a count for each layer
    assert large.chosen.traffic.ranks == 2 * 7 * 4 * GIB // 8


def test_fsdp2_states_equal_a_manual_computation(large):
    states, layer = of(large, "fsdp2").states, 4 * WIDTH * WIDTH
    assert (states.parameters, states.gradients) == (GIB // 2, GIB // 2)
    assert states.optimizer == GIB + 4 * LAYERS
    assert states.buffers == 5 * layer
    assert of(large, "fsdp2").traffic.ranks == 3 * 7 * 4 * GIB // 8


def test_simplest_strategy_wins_if_traffic_is_about_equal():
    with torch.device("meta"):
        choice = choose(40, net=nn.Sequential(*[Layer() for _ in range(5 * LAYERS)]))
    fsdp2, zero = (of(choice, name).traffic.total for name in ("fsdp2", "zero-3"))
    assert zero < fsdp2 < 1.1 * zero
    assert choice.name == "fsdp2"


@pytest.mark.parametrize("name", ["zero-3", "fsdp2+offload"])
def test_otherwise_the_fitting_strategy_with_least_traffic_wins(large, name):
    """Half a billion parameters stay gathered in stage 3, so it may move less than FSDP2; offload moves more."""
    if name == "zero-3":
        with torch.device("meta"):
            small = nn.Sequential(*[Layer() for _ in range(LAYERS // 4)])
        choice = choose(4, net=small)
    else:
        choice = choose(of(large, name).states.device / GIB + 0.001)
    assert choice.name == name
    fitting = [candidate for candidate in choice.candidates if candidate.fits]
    assert choice.chosen.traffic.total <= 1.1 * min(candidate.traffic.total for candidate in fitting)


def test_more_memory_never_increases_traffic():
    moved = [choose(memory).chosen.traffic.total for memory in (1, 2, 4, 8, 16, 32)]
    assert moved == sorted(moved, reverse=True)


def test_strategies_that_sum_gradients_in_lower_precision_come_last():
    mixed = choose(100, precision="bf16-mixed")
    assert mixed.name == "ddp"
    assert of(mixed, "zero-1").traffic.total < mixed.chosen.traffic.total
    assert [c.name for c in mixed.candidates if c.rounds] == [n for n in CANDIDATES if n.startswith("zero")]
    assert "would move less but reduce gradients in bfloat16" in mixed.why
    assert not any(c.rounds for c in choose(100, precision="bf16-true").candidates)


def test_precision_changes_the_states():
    true = choose(100, precision="bf16-true")
    assert of(true, "ddp").states.parameters == 2 * GIB
    assert of(true, "ddp").states.optimizer == 4 * GIB + 4 * LAYERS
    assert of(true, "zero-1").states.parameters == 2 * GIB
    mixed = choose(100, precision="bf16-mixed")
    assert of(mixed, "ddp").states.parameters == 4 * GIB
    assert of(mixed, "fsdp2").traffic.ranks == (2 * 2 + 4) * 7 * GIB // 8  # gathers half as much


def test_host_memory_is_per_node(large):
    needs = of(large, "fsdp2+offload").states.host * 8 / GIB
    assert choose(1, host_gib=needs + 0.01).name == "fsdp2+offload"
    assert choose(1, nodes=2, host_gib=needs / 2 + 0.01).name == "fsdp2+offload"
    with pytest.raises(ValueError, match="of host memory on each node"):
        choose(1, host_gib=needs / 2 + 0.01)


def test_activations_are_predicted_from_a_batch():
    net, batch = TinyLM(depth=4), lm_batches(1, size=64, length=32)[0]
    choice = choose_strategy(net, None, 2, memory_gib=1, batch=batch)
    report = predict_memory(net, batch)
    held = sum(report.at_peak[key] for key in ("activations", "temporaries", "inputs"))
    assert choice.activation_bytes == held > report.peaks["activations"]
    assert choose_strategy(net, None, 2, memory_gib=1, activation_gib=0.5).activation_bytes == GIB // 2


def test_activations_affect_the_choice(large):
    needs = large.chosen.states.device / GIB
    assert choose(needs + 1.1, activation_gib=1).name == "ddp"
    assert choose(needs + 0.9, activation_gib=1).name != "ddp"


def test_choice_explains_the_reason():
    why = choose(4).why
    assert "fsdp2 fits with 2.31 GiB of 4.00 GiB on each device and moves 10.50 GiB a step" in why
    assert "ddp would move less but is 16.00 GiB over" in why
    assert "no simpler strategy moves less" in choose(100).why


def test_shortage_is_an_error():
    with pytest.raises(ValueError, match=r"the nearest is .*offload and lacks 0.\d+ GiB on each device") as caught:
        choose(0.1)
    assert "precision='bf16-mixed'" in str(caught.value)
    with pytest.raises(ValueError, match="Recompute activations"):
        choose(1, activation_gib=2)


def test_fsdp2_is_left_out_for_optimizers_without_dtensor_support():
    bnb = pytest.importorskip("bitsandbytes")
    choice = choose_strategy(nn.Linear(256, 256), bnb.optim.AdamW8bit, 2, memory_gib=1)
    assert not any(candidate.name.startswith("fsdp2") for candidate in choice.candidates)
    assert "FSDP2 is left out" in choice.notes[-1]
    assert choose(100).notes[1:] == ()


def test_one_device_has_no_traffic():
    choice = choose(100, devices=1)
    assert choice.name == "ddp"
    assert choice.chosen.traffic.total == 0
    assert choice.chosen.states.buffers == 0
    assert choice.strategy() == "auto"
    assert choose(10, devices=1).name == "zero-2+offload"  # gathers nothing twice


def test_chosen_strategy_can_be_created(large):
    assert isinstance(large.strategy(find_unused_parameters=True), DDPStrategy)


@pytest.mark.parametrize(("name", "offload"), [("fsdp2", None), ("fsdp2+offload", "cpu")])
def test_fsdp2_strategy_can_be_created(large, name, offload):
    from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy

    strategy = dataclasses.replace(large, name=name).strategy()
    assert isinstance(strategy, FSDP2Strategy)
    assert strategy.sharding.offload == offload


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "stage", "offloads"), [("zero-2", 2, False), ("zero-3+offload", 3, True)])
def test_zero_strategy_can_be_created(large, name, stage, offloads):
    pytest.importorskip("deepspeed")
    strategy = dataclasses.replace(large, name=name).strategy()
    section = strategy.config["zero_optimization"]
    assert section["stage"] == stage
    assert ("offload_optimizer" in section) == offloads
    assert section["reduce_bucket_size"] == large.sizes.reduce_bucket


def test_table_lists_all_candidates(large):
    text = io.StringIO()
    Console(file=text, width=170).print(choose(8).as_table())
    rows = {
        line.split()[1]: [c.strip() for c in line.split("│")[2:-1]]
        for line in text.getvalue().splitlines()
        if "│" in line
    }
    assert list(rows) == list(CANDIDATES)
    assert rows["ddp"] == ["4.00", "4.00", "8.00", "4.00", "20.00", "0", "7.00", "0", "no, 12.00 over"]
    assert rows["fsdp2"][-1] == "yes"
    assert "Activations are not counted" in text.getvalue()


def test_choice_serializes_to_json(large):
    found = json.loads(json.dumps(large.as_dict()))
    assert found["chosen"] == "ddp"
    assert found["candidates"][0]["states"]["gradients"] == 4 * GIB
    assert found["candidates"][0]["traffic"]["ranks"] == large.chosen.traffic.ranks


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"devices": 0}, "devices=0"),
        ({"nodes": 0}, "nodes=0"),
        ({"devices": 8, "nodes": 3}, "devices=8 in nodes=3"),
        ({"memory_gib": 0}, "memory_gib=0"),
        ({"memory_gib": -1.5}, "memory_gib=-1.5"),
        ({"memory_gib": float("nan")}, "memory_gib=nan"),
        ({"host_gib": 0}, "host_gib=0"),
        ({"activation_gib": -1}, "activation_gib=-1"),
        ({"activation_gib": 1, "batch": 1}, "both give the memory of activations"),
        ({"headroom": 1}, "headroom=1"),
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"optimizer": torch.optim.Adafactor}, "Adafactor with ZeRO"),
    ],
)
def test_invalid_arguments_are_refused(more, says):
    settings = {"optimizer": torch.optim.AdamW, "devices": 4, "memory_gib": 1, **more}
    with pytest.raises(ValueError, match=says):
        choose_strategy(nn.Linear(64, 64), **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is asked for its memory")
def test_memory_must_be_given_without_a_gpu():
    with pytest.raises(ValueError, match="memory_gib=None: there is no GPU whose memory could be read"):
        choose_strategy(nn.Linear(2, 2), torch.optim.AdamW, 2)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero-2"])
def test_unplanned_number_of_processes_is_refused_before_connecting(large, name):
    strategy = dataclasses.replace(large, name=name).strategy()
    t = trainer(devices=1, strategy=strategy)
    with pytest.raises(ValueError, match="was chosen for 8 devices, and the Trainer has 1: .*devices=1"):
        t.fit(TinyLM(), as_loader(lm_batches(1)))
    assert not torch.distributed.is_initialized()
