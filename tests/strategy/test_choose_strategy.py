import dataclasses
import json

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_fasttrain import FSDP2Strategy, LoRA, MicroBatching, QLoRA, ZeROStrategy
from lightning_fasttrain.memory import predict_memory
from lightning_fasttrain.strategy.choose_strategy import CANDIDATES, choose_strategy
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer

GIB = 2**30
LAYERS, WIDTH = 16, 2**13  # 2³⁰ parameters


class Layer(nn.Module):
    """A layer with an activation, so that the net consists of blocks."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def layers(number=LAYERS, width=WIDTH):
    with torch.device("meta"):
        return nn.Sequential(*[Layer(width) for _ in range(number)])


def choose(memory_gib, devices=8, net=None, **more):
    net = net or layers()
    step = {"loss": lambda net, batch: net(batch).sum(), "optimizer": torch.optim.AdamW, "device": "cpu"}
    settings = {**step, "memory_gib": memory_gib, "headroom": 0.0, **more}
    return choose_strategy(net, torch.zeros(1, net[0].linear.in_features), devices, **settings)


def choose_for_tiny(*techniques):
    net, batch = TinyLM(), lm_batches(1, size=8, length=32)[0]
    return choose_strategy(net, batch, 2, memory_gib=1, techniques=techniques)


@pytest.fixture(scope="module")
def large():
    return choose(100)


@pytest.fixture(scope="module")
def small():
    return choose(100, net=layers(LAYERS // 4))


@pytest.fixture(scope="module")
def tiny():
    return choose_for_tiny()


@pytest.fixture(scope="module")
def tiny_in_parts():
    return choose_for_tiny(MicroBatching(2))


def of(choice, name):
    return next(candidate for candidate in choice.candidates if candidate.name == name)


def test_ddp_is_chosen_if_it_fits(large):
    assert large.name == "ddp"
    assert [candidate.name for candidate in large.candidates] == list(CANDIDATES)
    ddp = large.chosen
    assert ddp.states == (4 * GIB, 4 * GIB, 8 * GIB + 4 * LAYERS)  # a count of steps for each layer
    assert 0 <= ddp.other_bytes - 4 * GIB < 0.8 * GIB  # DDP's buckets, and temporaries of AdamW's step on a CPU
    assert ddp.traffic.ranks == 2 * 7 * 4 * GIB // 8


def test_fsdp2_shards_the_states_and_gathers_a_few_layers(large):
    memory, layer = of(large, "fsdp2").memory, 4 * WIDTH * WIDTH
    assert memory.peaks["gradients"] == GIB // 2
    assert memory.peaks["optimizer state"] == GIB + 4 * LAYERS
    assert GIB // 2 + layer <= memory.peaks["parameters"] <= GIB // 2 + 4 * layer
    assert of(large, "fsdp2").traffic.ranks == 3 * 7 * 4 * GIB // 8


def test_offload_moves_the_states_to_the_host(large):
    memory, layer = of(large, "fsdp2+offload").memory, 4 * WIDTH * WIDTH
    shards = GIB // 2
    assert memory.host_bytes == pytest.approx(4 * shards + 4 * LAYERS, rel=0.06)  # and the step's temporaries
    assert layer <= memory.peak_bytes <= 6 * layer  # what is gathered, and gradients that are not yet reduced
    assert of(large, "fsdp2").memory.host_bytes == 0


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_memory_is_that_of_predict_memory(tiny_in_parts, name):
    """The table and the function are one prediction."""
    kind, _, stage = name.partition("-")
    settings = {"offload": "cpu"} if kind.endswith("offload") else {}
    strategy = ZeROStrategy(stage) if kind == "zero" else FSDP2Strategy(**settings)
    net, batch = TinyLM(), lm_batches(1, size=8, length=32)[0]
    report = predict_memory(
        net, batch, techniques=[MicroBatching(2)], strategy="ddp" if kind == "ddp" else strategy, world=2
    )
    if kind != "zero":
        assert of(tiny_in_parts, name).memory == report
    else:  # the strategy has buckets of its own setting
        assert of(tiny_in_parts, name).memory.peak_bytes == pytest.approx(report.peak_bytes, rel=0.02)
    assert report.peak_bytes > 0


def test_ddp_needs_what_one_device_needs_and_its_buckets():
    net, batch = TinyLM(depth=4), lm_batches(1, size=8, length=32)[0]
    alone = predict_memory(net, batch, device="cpu").peak_bytes
    gradients = sum(p.nbytes for p in net.parameters())
    assert predict_memory(net, batch, device="cpu", strategy="ddp", world=2).peak_bytes == alone + gradients
    views = DDPStrategy(gradient_as_bucket_view=True)
    assert predict_memory(net, batch, device="cpu", strategy=views, world=2).peak_bytes == alone
    assert predict_memory(net, batch, device="cpu", strategy="ddp").peak_bytes == alone


def test_an_optimizer_that_exists_is_predicted_as_one_that_is_made():
    net, batch = TinyLM(depth=4), lm_batches(1, size=8, length=32)[0]
    groups = [{"params": net.parameters(), "weight_decay": 0.1}]
    made = predict_memory(net, batch, optimizer=torch.optim.Adagrad, device="cpu")
    optimizer = torch.optim.Adagrad(groups)
    before = {id(p): dict(state) for p, state in optimizer.state.items()}
    assert predict_memory(net, batch, optimizer=optimizer, device="cpu").peaks == made.peaks
    assert {id(p): dict(state) for p, state in optimizer.state.items()} == before
    with pytest.raises(ValueError, match="tensors that are not parameters of the module"):
        predict_memory(TinyLM(depth=4), batch, optimizer=optimizer, device="cpu")


def test_simplest_strategy_wins_if_traffic_is_about_equal():
    choice = choose(12, net=layers(LAYERS // 2, 2 * WIDTH), strategies=("ddp", "fsdp2", "zero-3"))
    fsdp2, zero = (of(choice, name).traffic.total for name in ("fsdp2", "zero-3"))
    assert zero < fsdp2 < 1.1 * zero
    assert choice.name == "fsdp2"


def test_otherwise_the_fitting_strategy_with_least_traffic_wins(small):
    """Half a billion parameters stay gathered in stage 3, so it may move less than FSDP2; offload moves more."""
    choice = choose(4, net=layers(LAYERS // 4))
    assert choice.name == "zero-3"
    fitting = [candidate for candidate in choice.candidates if candidate.fits]
    assert choice.chosen.traffic.total <= 1.1 * min(candidate.traffic.total for candidate in fitting)
    limit = of(small, "fsdp2+offload").device_bytes / GIB + 0.001
    assert choose(limit, net=layers(LAYERS // 4)).name == "fsdp2+offload"


def test_strategies_that_sum_gradients_in_lower_precision_come_last():
    mixed = choose(100, precision="bf16-mixed")
    assert mixed.name == "ddp"
    assert of(mixed, "zero-1").traffic.total < mixed.chosen.traffic.total
    assert [c.name for c in mixed.candidates if c.rounds] == [n for n in CANDIDATES if n.startswith("zero")]
    assert "would move less but reduce gradients in bfloat16" in mixed.why
    assert of(mixed, "ddp").states[0] == 4 * GIB
    assert of(mixed, "fsdp2").traffic.ranks == (2 * 2 + 4) * 7 * GIB // 8  # gathers half as much


def test_bfloat16_halves_the_parameters():
    true = choose(100, precision="bf16-true", strategies=("ddp", "zero-1"))
    assert not any(candidate.rounds for candidate in true.candidates)
    assert of(true, "ddp").states == (2 * GIB, 2 * GIB, 4 * GIB + 4 * LAYERS)
    assert of(true, "zero-1").states[0] == 2 * GIB


def test_host_memory_is_per_node(small):
    offloaded = of(small, "fsdp2+offload")
    nearly = {"net": layers(LAYERS // 4), "strategies": ("fsdp2", "fsdp2+offload")}
    needs = offloaded.memory.host_bytes * 8 / GIB
    limit = offloaded.device_bytes / GIB + 0.001
    assert choose(limit, host_gib=needs + 0.01, **nearly).name == "fsdp2+offload"
    assert choose(limit, nodes=2, host_gib=needs / 2 + 0.01, **nearly).name == "fsdp2+offload"
    with pytest.raises(ValueError, match="of host memory on each node"):
        choose(limit, host_gib=needs / 2 + 0.01, **nearly)


def test_choice_explains_the_reason(large):
    why = choose(4).why
    assert why.startswith("fsdp2 fits with ")
    assert "GiB of 4.00 GiB on each device and moves 10.50 GiB a step" in why
    assert "ddp would move less but is 16." in why
    assert "no simpler strategy moves less" in large.why


def test_shortage_is_an_error():
    with pytest.raises(ValueError, match=r"the nearest is .*offload and lacks 0.\d+ GiB on each device") as caught:
        choose(0.1, net=layers(LAYERS // 4))
    assert "precision='bf16-mixed'" in str(caught.value)
    with pytest.raises(ValueError, match="Recompute activations"):
        choose_strategy(TinyLM(), lm_batches(1, size=512, length=64)[0], 2, memory_gib=0.002, device="cpu")


def test_adapters_are_predicted_and_quantised_weights_leave_fsdp2_out(tiny):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    adapted = choose_for_tiny(LoRA(rank=2))
    assert adapted.chosen.memory.peaks["optimizer state"] < 0.7 * tiny.chosen.memory.peaks["optimizer state"]
    assert adapted.chosen.traffic.ranks < 0.7 * tiny.chosen.traffic.ranks  # gradients of adapters alone
    quantised = choose_for_tiny(QLoRA(rank=2))
    assert not any(candidate.name.startswith("fsdp2") for candidate in quantised.candidates)
    assert "FSDP2 is left out" in quantised.notes[0]


def test_fsdp2_is_left_out_for_optimizers_without_dtensor_support(large):
    bnb = pytest.importorskip("bitsandbytes")
    choice = choose_strategy(TinyLM(), lm_batches(1)[0], 2, optimizer=bnb.optim.AdamW8bit, memory_gib=1)
    assert not any(candidate.name.startswith("fsdp2") for candidate in choice.candidates)
    assert "FSDP2 is left out" in choice.notes[-1]
    assert large.notes == ()


def test_one_device_has_no_traffic():
    choice = choose(100, devices=1, strategies=("ddp", "zero-2+offload"))
    assert choice.name == "ddp"
    assert choice.chosen.traffic.total == 0
    assert choice.chosen.other_bytes < GIB  # no buckets
    assert choice.strategy() == "auto"


def test_chosen_strategy_can_be_created(large):
    assert isinstance(large.strategy(find_unused_parameters=True), DDPStrategy)


@pytest.mark.parametrize(("name", "offload"), [("fsdp2", None), ("fsdp2+offload", "cpu")])
def test_fsdp2_strategy_can_be_created(large, name, offload):
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
    table = dataclasses.replace(large, usable_bytes=8 * GIB).as_table().as_text(170)
    lines = [line.replace(" ←", "").split() for line in table.splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in CANDIDATES and len(line) == 10}
    assert list(rows) == list(CANDIDATES)
    assert rows["ddp"][:3] == ["4.00", "4.00", "8.00"]
    assert rows["ddp"][5:] == ["0", "7.00", "0", "yes"]
    assert rows["fsdp2+offload"][5] == f"{of(large, 'fsdp2+offload').memory.host_bytes / GIB:.2f}"


def test_choice_serializes_to_json(large):
    found = json.loads(json.dumps(large.as_dict()))
    assert found["chosen"] == "ddp"
    assert found["candidates"][0]["at_peak"]["gradients"] == 4 * GIB
    assert found["candidates"][0]["traffic"]["ranks"] == large.chosen.traffic.ranks


def test_micro_batches_gather_anew(tiny, tiny_in_parts):
    assert of(tiny_in_parts, "ddp").traffic == of(tiny, "ddp").traffic
    assert of(tiny_in_parts, "fsdp2").traffic.ranks > 1.5 * of(tiny, "fsdp2").traffic.ranks


def test_progress_is_told():
    told = []
    choose(100, net=layers(2), tell=told.append)
    assert told == ["a step under DDP and ZeRO", "a step under FSDP2"]


def test_a_step_that_fails_under_fsdp2_leaves_it_out():
    def past_the_block(net, batch):
        return nn.functional.linear(batch, net[0].linear.weight).sum() + net(batch).sum()

    choice = choose(1000, net=layers(2), loss=past_the_block)
    assert {candidate.name for candidate in choice.candidates} == {n for n in CANDIDATES if "fsdp2" not in n}
    assert "FSDP2 is left out: a step under it cannot be predicted" in choice.notes[0]
    with pytest.raises(ZeroDivisionError):
        choose(1000, net=layers(2), loss=lambda net, batch: 1 / 0)


def test_strategies_that_are_all_left_out_are_refused():
    bnb = pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match=r"strategies=\('fsdp2',\).*AdamW8bit do not work"):
        choose(1, net=layers(1), optimizer=bnb.optim.AdamW8bit, strategies=("fsdp2",))


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
        ({"headroom": 1}, "headroom=1"),
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"optimizer": torch.optim.Adafactor}, "Adafactor with ZeRO"),
        ({"strategies": ("zero-9",)}, "zero-9"),
    ],
)
def test_invalid_arguments_are_refused(more, says):
    with pytest.raises(ValueError, match=says):
        choose(**{"devices": 4, "memory_gib": 1, "net": layers(1), **more})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is asked for its memory")
def test_memory_must_be_given_without_a_gpu():
    with pytest.raises(ValueError, match="memory_gib=None: there is no GPU whose memory could be read"):
        choose(None, net=layers(1))


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero-2"])
def test_unplanned_number_of_processes_is_refused_before_connecting(large, name):
    strategy = dataclasses.replace(large, name=name).strategy()
    t = trainer(devices=1, strategy=strategy)
    with pytest.raises(ValueError, match="was chosen for 8 devices, and the Trainer has 1: .*devices=1"):
        t.fit(TinyLM(), as_loader(lm_batches(1)))
    assert not torch.distributed.is_initialized()
