"""Plans for clusters: the best of all layouts, as predicted directly, and refusals that name what works."""

import json
from contextlib import suppress
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_fasttrain as ft
from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.memory.fake_step import fake_module
from lightning_fasttrain.model import checkpoint_activations_
from lightning_fasttrain.planner import Layout, plan_cluster
from lightning_fasttrain.planner.predict_layout import DEPTHS, LayoutPredictor, resize_batch
from lightning_fasttrain.step_time import read_machine
from lightning_fasttrain.strategy.zero.zero_states import ZeROStage
from tests.support.nets import TinyLM, lm_batches

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's collectives
WIDTH = 256


def net(blocks=3):
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks)])


STEP = {"loss": lambda net, x: net(x).float().square().sum(), "optimizer": torch.optim.AdamW}


def machine_of(mib, **changes):
    """A machine whose devices have so much memory, and whose host is never late."""
    return replace(read_machine("H100"), memory_gib=mib / 1024, host_us=0.5, **changes)


def planned(module=net, samples=4096, **settings):
    return plan_cluster(module, torch.zeros(samples, WIDTH), **{"headroom": 0.0, **STEP, **settings})


def predicted(layout, machine, precision="bf16-mixed", module=net):
    """The step of a layout, predicted by hand."""
    strategy = ft.FSDP2Strategy(**layout.options)
    if layout.strategy != "fsdp2":
        strategy = "ddp" if layout.strategy == "ddp" else ZeROStage(layout.strategy[-1])
    return ft.predict_time(
        module,
        torch.zeros(layout.micro_batch, WIDTH),
        devices=layout.devices,
        nodes=layout.nodes,
        strategy=strategy,
        techniques=layout.techniques(),
        accumulate=layout.accumulate,
        precision=precision,
        machine=machine,
        **STEP,
    )


def every_layout(devices, samples, sizes):
    families = [Layout("ddp"), Layout("fsdp2"), *(Layout(f"zero-{stage}") for stage in (1, 2, 3))]
    count = samples // devices
    for family in families:
        for recompute in ("", "cheap", "all"):
            for micro in sizes:
                split = {"micro_batch": micro, "accumulate": count // micro}
                yield (layout := replace(family, devices=devices, recompute=recompute, **split))
                if layout.strategy == "fsdp2" and layout.accumulate > 1:
                    yield replace(layout, reduce_once=False)


@pytest.mark.parametrize(("mib", "precision", "sizes"), [(93, "bf16-mixed", (4096, 2048)), (640, "32-true", (4096,))])
def test_the_best_is_that_of_all_layouts(mib, precision, sizes):
    machine, fitting = machine_of(mib), []
    for layout in every_layout(2, 2 * 4096, sizes):
        if layout.strategy[:4] == "zero" and precision == "bf16-mixed":
            continue
        report = predicted(layout, machine, precision)
        if report.fits:
            fitting.append((report.seconds, layout, report))
    seconds, layout, report = min(fitting, key=lambda one: one[0])
    plan = planned(machine=machine, devices=2, precision=precision)
    assert plan.chosen.layout == layout
    assert plan.chosen.seconds == seconds
    assert plan.chosen.peak_bytes == report.peak_bytes
    assert plan.chosen.mfu == pytest.approx(report.mfu)
    assert plan.chosen.tokens_per_second == pytest.approx(report.samples_per_second)


def test_the_curve_and_all_rows_are_direct_predictions():
    machine = machine_of(93)
    plan = planned(machine=machine, devices=4, nodes=2, tokens=1e9, top=2)
    points = [*plan.rows, *(point for line in plan.curve.values() for point in line)]
    assert {point.layout.devices for point in points} == {2, 4, 8}
    for point in points:
        report = predicted(point.layout, machine)
        assert point.seconds == report.seconds
        assert point.layout.micro_batch * point.layout.accumulate * point.layout.devices == 4 * 4096
        assert point.hours == pytest.approx(1e9 / (4 * 4096) * report.seconds / 3600)


def deep():
    return nn.ModuleDict({"blocks": nn.ModuleList(net(12))})


def loss_of_deep(net, x):
    for block in net["blocks"]:
        x = block(x)
    return x.float().square().sum()


def check_rows(plan, machine, seconds, peak_bytes, precision="bf16-mixed"):
    """Hold each row to the prediction of the whole model: the first, and those of ZeRO, exactly, others nearly."""
    for row in plan.rows:
        report = ft.predict_time(
            deep,
            torch.zeros(row.layout.micro_batch, WIDTH),
            strategy=row.layout.make_strategy(),
            accumulate=row.layout.accumulate,
            devices=4,
            techniques=row.layout.techniques(),
            precision=precision,
            machine=machine,
            **{**STEP, "loss": loss_of_deep},
        )
        is_whole = row is plan.chosen or row.layout.strategy.startswith("zero")
        assert row.seconds == pytest.approx(report.seconds, rel=0 if is_whole else seconds)
        assert row.peak_bytes == pytest.approx(report.peak_bytes, rel=0 if is_whole else peak_bytes)


def test_a_deep_model_is_compared_on_shallow_ones():
    machine = machine_of(640)
    plan = planned(deep, machine=machine, devices=4, top=3, loss=loss_of_deep)
    assert any("on 3 and 4 of its 12 blocks" in note for note in plan.notes)
    check_rows(plan, machine, seconds=0.02, peak_bytes=0.05)


class AfterALongOne(nn.Module):
    """Blocks after a product that is longer, and has a larger gradient, than a few of them together."""

    def __init__(self, wide, blocks=40):
        super().__init__()
        self.first = nn.Linear(WIDTH, wide, bias=False)
        self.blocks = nn.ModuleList(net(blocks))

    def forward(self, x):
        first = self.first(x.expand(len(x), WIDTH))
        y = x + first.mean(-1, keepdim=True)
        for block in self.blocks:
            y = block(y)
        return y


def predict_both(module, samples, machine, layout):
    """Predict a layout on shallow models, and on the whole one."""
    given = {**STEP, "precision": "bf16-mixed", "machine": machine}
    predictor = LayoutPredictor(
        fake_module(module, FakeMode()), torch.zeros(samples, WIDTH), [], given, lambda said: None
    )
    assert len(predictor.shallow) == len(DEPTHS)
    return [predictor.predict(replace(layout, micro_batch=samples), exact) for exact in (False, True)]


@pytest.mark.parametrize("layout", [Layout("ddp", devices=4), Layout("fsdp2", devices=4)], ids=str)
def test_a_deep_model_may_reach_its_peak_at_another_moment(layout):
    shallow, whole = predict_both(lambda: AfterALongOne(2**14), 1024, machine_of(640), layout)
    assert shallow.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.03)


@pytest.mark.parametrize("layout", [Layout("one"), Layout("fsdp2", devices=4, accumulate=5)], ids=str)
def test_a_long_kernel_does_not_hide_the_launches_of_a_deep_model(layout):
    machine = replace(machine_of(640), host_us=50.0)
    shallow, whole = predict_both(lambda: AfterALongOne(2**18), 4096, machine, layout)
    _, never_late = predict_both(lambda: AfterALongOne(2**18), 4096, replace(machine, host_us=0.0), layout)
    assert whole.seconds > 2 * never_late.seconds
    assert shallow.seconds == pytest.approx(whole.seconds, rel=0.02)


def test_a_model_of_which_some_blocks_are_frozen_is_predicted_whole():
    model = AfterALongOne(WIDTH)
    given = {**STEP, "precision": "bf16-mixed", "machine": machine_of(640)}
    for frozen, count in ((6, 0), (len(model.blocks), len(DEPTHS))):
        model.blocks[:frozen].requires_grad_(False)
        predictor = LayoutPredictor(fake_module(model, FakeMode()), torch.zeros(8, WIDTH), [], given, lambda said: None)
        assert len(predictor.shallow) == count


class WideBlock(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).mean(-1, keepdim=True)


@pytest.mark.parametrize("trains_weights", [True, False])
def test_zero_is_predicted_on_few_blocks_where_the_gradients_of_one_fill_a_bucket(trains_weights):
    wide = 2**20  # so that a block has 268 million weights, and a bucket 200 million gradients
    net = fake_module(lambda: AfterALongOne(WIDTH, blocks=1), FakeMode())
    with FakeMode():
        net.blocks = nn.ModuleList(WideBlock(WIDTH, wide) for _ in range(9))
    for block in net.blocks:
        block.weight.requires_grad_(trains_weights)
    given = {**STEP, "precision": "bf16-mixed", "machine": machine_of(2**30)}
    predictor = LayoutPredictor(net, torch.zeros(1, WIDTH), [], given, lambda said: None)
    assert predictor.predict(Layout("zero-2", devices=4), exact=False).exact is not trains_weights


def test_what_is_predicted_first_is_as_what_is_predicted_again():
    # FSDP2 sums the gradients of micro-batches by operators on sharded tensors, whose shapes are found only once.
    width = 1096  # of no other test
    net = fake_module(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 8, dropout=0.0), 2), FakeMode())
    given = {**STEP, "precision": "bf16-mixed", "machine": machine_of(640)}
    layout = Layout("fsdp2", devices=4, tensor_parallel=2, micro_batch=8, accumulate=2)
    points = []
    for _ in range(2):
        predictor = LayoutPredictor(net, torch.zeros(8, width), [], given, lambda said: None)
        points.append(predictor._run(net, layout, warms_up=False)[0])
    assert points[0] == points[1]


@pytest.mark.parametrize(("mib", "sums"), [(200, True), (190, False)])
def test_layouts_whose_sums_of_gradients_alone_do_not_fit_are_not_predicted(mib, sums):
    considered = []
    with suppress(ValueError):
        planned(
            lambda: nn.Sequential(*[nn.Linear(WIDTH, 2**14, bias=False) for _ in range(12)]),  # 192 MiB of gradients
            samples=512,
            machine=machine_of(mib),
            devices=64,
            nodes=8,
            precision="32-true",
            loss=lambda net, x: sum(layer(x).sum() for layer in net),
            tell=considered.append,
        )
    split = [said for said in considered if "FSDP2, " in said and "batches of" in said]
    assert any("reduced each" in said for said in split)
    assert any("reduced each" not in said and "parallel" not in said for said in split) is sums


class Manual(L.LightningModule):
    """A module that steps its optimizer itself, and so has no micro-batches."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).float().square().mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_a_module_without_micro_batches_is_planned_where_it_needs_none():
    settings = {"loss": None, "optimizer": None, "machine": machine_of(640), "devices": 2, "top": 1}
    plan = planned(Manual, **settings)
    assert plan.chosen.layout.accumulate == 1
    # With half of the devices each has two batches.
    (points,) = plan.curve.values()
    assert [point.layout.devices for point in points] == [2, 4]


def test_zero_is_predicted_on_all_blocks_where_its_buckets_hold_several():
    # The buckets are as large as the model, so that a shallow one has smaller ones.
    machine = machine_of(640)
    plan = planned(deep, machine=machine, devices=4, top=9, loss=loss_of_deep, precision="32-true")
    assert sum(row.layout.strategy.startswith("zero") for row in plan.rows) >= 2
    check_rows(plan, machine, seconds=0.02, peak_bytes=0.05, precision="32-true")


def test_what_cannot_fit_is_refused_with_its_shortfall_and_a_way_out():
    machine = machine_of(2)
    with pytest.raises(ValueError, match="Nothing fits") as refused:
        planned(samples=1, machine=machine, devices=2, techniques=[ft.ActivationCheckpointing()])
    leanest = ft.predict_memory(
        net,
        torch.zeros(1, WIDTH),
        **STEP,
        strategy=ft.FSDP2Strategy(),
        world=2,
        precision="bf16-mixed",
        techniques=[ft.ActivationCheckpointing()],
    )
    lacks = (leanest.peak_bytes - 2 * 2**20) / 2**30
    said = str(refused.value)
    assert f"lacks {lacks:.2g} GiB on each device" in said
    assert "devices under FSDP2" in said or "such as T4" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "H1000"}, r"gpu='H1000': it is not in the table. Use B300, .*fasttrain machine --out"),
        ({"devices": 10, "nodes": 4}, r"devices=10 in nodes=4: .* Use devices=8 or 12"),
        ({"precision": "bf17"}, "precision"),
        ({"batch_tokens": 100}, "batch_tokens=100: the batch holds no token ids"),
        ({"headroom": 1.0}, "headroom"),
    ],
)
def test_bad_input_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        planned(**settings)


@pytest.mark.parametrize(
    ("devices", "tokens", "message"),
    [
        (1, 17, r"batch_tokens=17: a sequence of the batch has 5 tokens. Use 15 or 20"),
        (4, 35, r"batch_tokens=20 or 40"),
    ],
)
def test_a_global_batch_that_cannot_be_divided_is_refused_with_the_nearest(devices, tokens, message):
    with pytest.raises(ValueError, match=message):
        plan_cluster(TinyLM(), lm_batches(1)[0], devices=devices, nodes=devices, batch_tokens=tokens)


def test_a_language_model_is_planned_with_its_tokens_and_head():
    plan = plan_cluster(TinyLM(), lm_batches(1)[0], gpu="L4", devices=2, network=10, batch_tokens=60, tokens=600, top=2)
    assert (plan.unit, plan.global_batch) == ("tokens", 60)
    chosen = plan.chosen
    assert chosen.total_per_second == pytest.approx(60 / chosen.seconds)
    assert chosen.hours == pytest.approx(10 * chosen.seconds / 3600)
    assert any("pipeline parallelism, offload" in note for note in plan.notes)
    assert max(map(len, plan.as_table().as_text(80).splitlines())) <= 80
    json.dumps(plan.as_dict())
    compile(plan.code(), "plan", "exec")


def test_a_plan_does_not_say_what_holds_of_one_layout(caplog):
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32)
    settings = {"loss": lambda net, ids: net(input_ids=ids, labels=ids).loss, "optimizer": torch.optim.AdamW}
    say_once.cache_clear()
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        techniques = [ft.ActivationCheckpointing()]
        ids = torch.zeros(2, 32, dtype=torch.long)
        plan_cluster(lambda: GPT2LMHeadModel(config), ids, devices=2, top=1, techniques=techniques, **settings)
        assert "lightning_fasttrain" not in {record.name for record in caplog.records}
        checkpoint_activations_(GPT2LMHeadModel(config))
    assert "use_cache=False" in caplog.text


def test_the_network_is_that_between_nodes():
    machine = machine_of(640)
    plan = planned(machine=machine, devices=2, nodes=2, network=80, top=1)
    slower = replace(machine, between=replace(machine.between, gb_per_s=10))
    assert plan.chosen.seconds == predicted(plan.chosen.layout, slower).seconds


def test_a_batch_is_resized_without_values():
    batch = {"x": torch.zeros(2, 3), "names": ["a", "b"], "scale": torch.tensor(2.0)}
    larger = resize_batch(batch, 2, 5)
    assert larger["x"].shape == (5, 3)
    assert larger["names"] == ["a"] * 5
    assert larger["scale"].shape == ()
