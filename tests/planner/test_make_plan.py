"""A plan fits, is the fastest of what was tried, says why, and leaves everything as it was."""

import json
import math
import operator
import random
import sys
from contextlib import nullcontext
from dataclasses import replace

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_fasttrain as ft
from lightning_fasttrain.core.device import free_bytes
from lightning_fasttrain.planner.auto import count_batches, first_batch
from lightning_fasttrain.planner.candidates import (
    SWITCHES,
    Budget,
    Choice,
    Predictions,
    code_of,
    config_of,
    find_axes,
    switch_of,
)
from lightning_fasttrain.planner.plan import is_decided, is_slower
from lightning_fasttrain.planner.search import Search
from lightning_fasttrain.planner.timing import Costs, Stopwatch, Timed, assume_costs, compare_times
from lightning_fasttrain.technique.declarations import facts_of_machine
from lightning_fasttrain.technique.technique import techniques_of
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer, weights

BATCH = lm_batches(1, size=32, length=24)[0]
GIB = 2**30


class TwoBlocks(TinyLM):
    def __init__(self):
        super().__init__(depth=2)


def plan(memory_gib, module=None, batch=BATCH, **settings):
    return ft.make_plan(module or TwoBlocks(), batch, memory_gib, **{"device": "cpu", "seconds": 0.5, **settings})


@pytest.fixture(scope="module")
def tight():
    """A plan for three fifths of what the plain step takes."""
    whole = ft.predict_memory(TwoBlocks(), BATCH, device="cpu").peak_bytes / GIB
    return plan(0.6 * whole, keep="exact")


def test_it_fits_and_the_plain_step_does_not(tight):
    limit = tight.limit_gib * GIB
    assert tight.plain.predicted_bytes > limit
    assert 0 < tight.chosen.peak_bytes <= limit
    assert tight.chosen.predicted_bytes == pytest.approx(tight.chosen.peak_bytes, rel=0.1)
    assert tight.measured


def test_nothing_that_was_measured_and_fits_is_clearly_faster(tight):
    fitting = [t for t in tight.tried if t.step_ms and t.predicted_bytes <= tight.limit_gib * GIB]
    assert min(min(t.step_ms) for t in fitting) <= tight.chosen.ms
    assert len(tight.tried) > 3


def test_every_technique_has_a_reason_and_everything_left_out_too(tight):
    assert len(tight.reasons) == len(tight.callbacks) > 0
    assert "keep='exact'" in tight.left_out["compile blocks"]
    assert "already" in tight.left_out["loader prefetched"]
    refused = [t for t in tight.tried if t is not tight.chosen and not t.why_not]
    assert not refused


def test_code_yaml_json_and_the_trainer_say_the_same(tight, tmp_path):
    made = {}
    exec(tight.code().replace("L.Trainer(", "L.Trainer(accelerator='cpu', logger=False,"), made)
    of_code = [repr(callback) for callback in made["trainer"].callbacks if isinstance(callback, ft.Technique)]
    assert of_code == list(map(repr, techniques_of(tight.trainer(accelerator="cpu", logger=False))))
    assert of_code
    read = yaml.safe_load(tight.yaml())["trainer"]
    assert [entry["class_path"].split(".")[-1] for entry in read["callbacks"]] == [r.split("(")[0] for r in of_code]
    assert json.loads(tight.save(tmp_path / "plan.json").read_text())["chosen"]["why_not"] == ""
    assert tight.save_picture(tmp_path / "plan.png").stat().st_size > 1000


def test_what_is_planned_is_the_same_training_and_leaves_no_trace():
    net, numbers = TwoBlocks(), torch.get_rng_state()
    before = weights(net)
    found = plan(0.001, net, keep="exact")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    if found.callbacks:
        assert ft.verify(net, BATCH, found.callbacks, accelerator="cpu").ok


def test_with_room_for_everything_nothing_is_recomputed():
    found = plan(1.0, keep="exact", device="cuda")  # that is not here: times are estimated, and always the same
    assert found.chosen.choice.recompute == ""
    assert found.chosen.choice.parts == 1


def test_by_default_the_limit_is_what_is_free():
    found = plan("fit", keep="exact")
    assert 0 < found.limit_gib <= free_bytes(torch.device("cpu")) / GIB * 1.5
    assert found.chosen.predicted_bytes <= found.limit_gib * GIB


def test_what_does_not_fit_is_said_with_the_shortfall():
    with pytest.raises(
        ValueError, match=r"memory_gib=1e-05: the leanest choice .* too much. Give more memory.*adapters"
    ):
        plan(1e-5, keep="exact")


def test_a_loss_that_needs_the_whole_batch_may_run_in_parts_through_the_backbone():
    class Contrastive(TwoBlocks):
        def loss(self, batch):
            x = F.normalize(self(batch["input_ids"]).mean(1), dim=1)
            return F.cross_entropy(x @ x.T, torch.arange(len(x)))

    found = plan(1.0, Contrastive(), keep="exact")
    assert found.chosen.choice.parts == 1  # it fits
    assert "parts" not in found.left_out
    assert "deferred logits" in found.left_out["head"]


def test_batch_norm_is_not_cut_unless_training_may_change():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    settings = {"loss": lambda n, b: F.cross_entropy(n(b[0]), b[1]), "optimizer": torch.optim.AdamW}
    assert "BatchNorm" in plan(1.0, net, batch, keep="exact", **settings).left_out["parts"]


def test_a_device_that_is_not_here_is_planned_for_by_prediction():
    if torch.cuda.is_available():
        pytest.skip("it is here")
    found = plan(0.08, device="cuda", keep="tolerance")
    assert not found.measured
    assert found.chosen.predicted_bytes <= 0.08 * GIB
    assert any("nothing was measured" in note for note in found.notes)


def test_several_devices_get_a_strategy_that_shards_what_does_not_fit():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)])
    batch = torch.randn(4, 512)
    settings = {"loss": lambda n, b: n(b).square().mean(), "optimizer": torch.optim.AdamW, "keep": "exact"}
    states = 4 * 4 * sum(p.numel() for p in net.parameters()) / GIB
    roomy = plan(2 * states, net, batch, devices=4, **settings)
    assert roomy.strategy.name == "ddp"
    found = plan(0.6 * states, net, batch, devices=4, nodes=2, **settings)
    assert found.strategy.name in ("fsdp2", "zero-3")
    assert found.strategy.chosen.device_bytes < 0.6 * states * GIB
    assert "devices=2,\n    num_nodes=2," in found.code()
    assert yaml.safe_load(found.yaml())["trainer"]["devices"] == 2
    assert found.as_dict()["strategy"]["chosen"] == found.strategy.name
    assert found.settings["num_nodes"] == 2


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"memory_gib": 0}, r"memory_gib=0\): it must be greater than 0"),
        ({"memory_gib": "most"}, "memory_gib='most'"),
        ({"keep": "roughly"}, "keep='roughly'"),
        ({"seconds": 0}, "seconds=0"),
        ({"precision": "8-bit"}, "precision='8-bit'"),
    ],
)
def test_bad_input_is_refused_at_once(settings, error):
    with pytest.raises(ValueError, match=error):
        plan(**{"memory_gib": 1.0, **settings})


def test_a_line_through_two_predictions_meets_the_others():
    memory = Predictions(TinyLM(), BATCH, "cpu", [1, 2, 4, 8, 16])
    choice = Choice(parts=4)
    guessed = memory.predict(choice)
    assert guessed == pytest.approx(memory.predict(choice, exactly=True), rel=0.05)


def test_a_budget_keeps_whole_blocks_between_none_and_all():
    free = Predictions(TinyLM(depth=4), BATCH, "cpu", [1])
    low, high = free.predict(Choice(recompute="all")), free.predict(Choice())
    for share, kept in ((-0.5, 0), (0.0, 0), (0.3, 1), (0.6, 2), (0.99, 3), (1.0, 4), (2.0, 4)):
        limit = low + (high - low) * share
        free.budget_bytes = limit + 1
        expected = low + (high - low) * kept / 4
        assert free.predict(Choice(recompute=Budget.within(limit / GIB))) == pytest.approx(expected)


def test_a_plan_needs_no_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    facts = facts_of_machine()
    axes = find_axes(TinyLM(), lm_batches(1)[0], facts, ft.technique.Exactness.CHANGES_TRAINING, "32-true", None)
    reason = "peft is not installed: it comes with the extra 'finetune'. pip install 'lightning-fasttrain[finetune]'"
    assert reason in axes.left_out.values()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_graphs_are_tried_on_a_gpu_alone(device):
    facts = replace(facts_of_machine(), device=device, compiler=True)
    tolerance = ft.technique.Exactness.TOLERANCE
    axes = find_axes(TinyLM(), lm_batches(1)[0], facts, tolerance, "32-true", None)
    graphs = "blocks as CUDA graphs"
    assert (graphs in axes.words["compile"]) == (device == "cuda")
    assert axes.left_out.get(f"compile {graphs}") == {"cpu": "it differs from another setting on cuda alone"}.get(
        device
    )
    assert switch_of("compile", graphs).make().mode == "reduce-overhead"


def test_the_time_of_compilation_is_that_of_the_first_way():
    costs = Costs(compile_ms=30e3)
    costs.note_compilation(Timed([100.0], first_ms=5100.0))
    costs.factors["compile", "blocks"] = 0.8
    costs.note_compilation(Timed([90.0], first_ms=290.0))  # from the cache
    assert costs.compile_ms == 5000.0


def test_a_budget_is_chosen_where_it_is_the_fastest():
    """A batch of one sample has no parts; three of four blocks may be kept, which no other policy does."""
    net, batch = TinyLM(depth=8), lm_batches(1, size=1, length=512)[0]
    memory = Predictions(net, batch, "cpu", [1])
    half, plain = memory.predict(Choice(recompute="half")), memory.predict(Choice())
    limit = (half + 3 * plain) / 4 / GIB
    axes = find_axes(net, batch, facts_of_machine(), ft.technique.Exactness.EXACT, "32-true", None, limit)
    axes.words |= {"head": [""], "gradients": [""]}
    memory = Predictions(net, batch, "cpu", [1], limit * GIB)
    search = Search(
        axes, memory, lambda choice, needed: needed <= limit * GIB, limit, None, steps=1, seconds=1, tell=print
    )
    search.costs.factors = {("recompute", "selective"): 1.2}
    best = search._find_finalists()[0]
    assert best.choice == Choice(recompute=Budget.within(limit))
    share = (plain - memory.predict(best.choice)) / (plain - memory.predict(Choice(recompute="all")))
    assert 0 < share < 0.5
    assert best.estimated_ms == pytest.approx(search.costs.estimate(Choice(), 1) * (1 + share * 0.32))


def test_costs_multiply_and_compiling_is_shared_by_the_steps():
    costs = Costs(
        whole=100.0, per_part=2.0, factors={("recompute", "all"): 1.3, ("compile", "blocks"): 0.5}, compile_ms=1000
    )
    choice = Choice(parts=4, recompute="all")
    assert costs.estimate(choice, 100) == pytest.approx(108 * 1.3)
    assert costs.estimate(replace(choice, compile="blocks"), 100) == pytest.approx(108 * 1.3 * 0.5 + 10)


WORDS = [(axis, word) for axis, words in SWITCHES.items() for word in words] + [("recompute", Budget.within(1.5))]


@pytest.mark.parametrize(("axis", "word"), WORDS)
def test_code_config_and_technique_of_a_switch_are_the_same(axis, word):
    made = switch_of(axis, word).make()
    assert repr(eval(code_of(made))) == repr(made)
    config = config_of(made)
    assert class_in(config) is type(made)
    assert repr(made_of(config)) == repr(made)


def made_of(config):
    """What LightningCLI makes of it."""
    arguments = config.get("init_args", {}).items()
    made = {name: made_of(value) if isinstance(value, dict) else value for name, value in arguments}
    return class_in(config)(**made)


def class_in(config):
    return operator.attrgetter(config["class_path"].removeprefix("lightning_fasttrain."))(ft)


def test_of_each_axis_there_is_something_to_try():
    assert all(SWITCHES.values())
    assert set(SWITCHES) == set(vars(Choice())) - {"parts", "precision"}
    assert [*SWITCHES["recompute"]] == ["selective", "half", "all"]  # from the least that is computed again


def test_a_model_that_cannot_be_predicted_is_measured():
    class CountsItsLabels(TinyLM):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * batch["labels"].clamp(min=0).flatten().bincount().sum()

    found = plan(1.0, CountsItsLabels(), keep="exact")
    assert found.plain.predicted_bytes > 0
    assert any("Memory was measured, since it cannot be predicted" in note for note in found.notes)


def test_a_ratio_of_turns_has_students_interval():
    """Of fewer than five turns nothing is trimmed; 4.303 is t of two degrees of freedom at 97.5%."""
    logs = [0.10, 0.13, 0.16]
    ratio = compare_times([100.0] * 3, [100 * math.exp(log) for log in logs])
    assert math.log(ratio.value) == pytest.approx(0.13)
    assert math.log(ratio.high / ratio.value) == pytest.approx(4.303 * 0.03 / math.sqrt(3))
    assert math.log(ratio.value / ratio.low) == pytest.approx(4.303 * 0.03 / math.sqrt(3))


def test_one_turn_that_was_disturbed_does_not_move_the_ratio():
    base, other = [100.0] * 6, [110.0, 111.0, 109.0, 110.0, 110.0, 240.0]
    ratio = compare_times(base, other)
    assert 1.08 < ratio.low < 1.10 < ratio.high < 1.13
    assert compare_times(base, [110.0] * 6).value == pytest.approx(1.1)


def test_intervals_contain_the_truth_as_often_as_they_say():
    """10,000 comparisons of five turns with normal noise: 95% within what chance allows."""
    draw = random.Random(0)
    held = 0
    for _ in range(10_000):
        ratio = compare_times([1.0] * 5, [math.exp(draw.gauss(0.2, 0.05)) for _ in range(5)])
        held += ratio.low < math.exp(0.2) < ratio.high
    assert 0.93 < held / 10_000 < 0.985


def test_a_choice_is_slower_only_where_noise_cannot_explain_it():
    fastest = [100.0, 101.0, 99.0]
    assert is_slower([108.0, 110.0, 107.0], fastest)
    assert not is_slower([103.0, 104.0, 102.0], fastest)  # certain, and less than is worth a technique
    assert not is_slower([95.0, 118.0, 106.0], fastest)
    assert is_slower([130.0, 190.0, 105.0], fastest)  # not certain, and too much to be given away
    assert is_decided([fastest, [130.0, 131.0, 129.0]])
    assert not is_decided([fastest, [95.0, 118.0, 106.0]])


def test_a_long_run_is_measured_for_a_share_of_its_time(monkeypatch):
    monkeypatch.setattr(sys.modules[ft.make_plan.__module__], "_MOST_SECONDS", 2.0)
    long = plan(1.0, seconds=None, steps=10**9, keep="exact")
    assert long.measured
    assert long.chosen.step_ms


def test_compiling_is_not_assumed_to_pay_in_a_short_run():
    costs = assume_costs(TwoBlocks(), BATCH, "cpu", None)
    compiled = Choice(compile="blocks")
    assert costs.estimate(compiled, 12) > costs.estimate(Choice(), 12)
    assert costs.estimate(compiled, 10**9) < costs.estimate(Choice(), 10**9)


# Auto


def fit_with(auto, folder, callbacks=(), net=None):
    t = trainer([auto, *callbacks], default_root_dir=folder, max_epochs=1)
    module = net or TwoBlocks()
    torch.manual_seed(11)
    t.fit(module, as_loader(lm_batches(2, size=32, length=24)))
    return t, module


def test_auto_plans_once_trains_the_same_and_keeps_the_plan(tmp_path):
    whole = ft.predict_memory(TwoBlocks(), BATCH, device="cpu").peak_bytes / GIB
    auto = ft.Auto(0.6 * whole, seconds=0.3)
    t, module = fit_with(auto, tmp_path)
    assert auto.choice != Choice()
    assert auto.plan is not None
    assert not [callback for callback in t.callbacks if isinstance(callback, ft.Technique)]
    plain = TwoBlocks()
    torch.manual_seed(11)
    trainer().fit(plain, as_loader(lm_batches(2, size=32, length=24)))
    for name, value in weights(plain).items():
        assert torch.allclose(value, module.state_dict()[name], atol=1e-4)
    again = ft.Auto(0.6 * whole, seconds=0.3)
    fit_with(again, tmp_path)
    assert again.plan is None
    assert again.choice == auto.choice
    assert again.state_dict()["choice"]["parts"] == auto.choice.parts
    other = ft.Auto(0.7 * whole, seconds=0.3)
    fit_with(other, tmp_path)
    assert other.plan is not None


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"max_steps": 12}, 12),
        ({"max_steps": 12, "accumulate_grad_batches": 4}, 48),
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 3, "limit_train_batches": 0.4}, 6),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": -1}, 10**9),
    ],
)
def test_the_batches_of_a_run_are_counted_before_it(settings, batches):
    assert count_batches(trainer(**{"max_epochs": None, **settings}), as_loader(lm_batches(5))) == batches


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 3), ("max_size", 5), ("sequential", 8), (None, 5)])
def test_the_batches_of_several_loaders_are_counted_as_lightning_combines_them(mode, batches):
    loaders = {"labeled": as_loader(lm_batches(5)), "unlabeled": as_loader(lm_batches(3))}
    given = CombinedLoader(loaders, mode) if mode else loaders
    assert count_batches(trainer(max_epochs=2), given) == 2 * batches


@pytest.mark.parametrize(("settings", "batches"), [({"limit_train_batches": 4}, 8), ({}, 10**9)])
def test_a_loader_without_a_length_is_counted_as_far_as_it_is_limited(settings, batches):
    assert count_batches(trainer(max_epochs=2, **settings), (batch for batch in lm_batches(9))) == batches


def test_a_short_run_is_not_measured_and_a_longer_one_plans_again(tmp_path):
    auto = ft.Auto(1.0)
    fit_with(auto, tmp_path)
    assert not auto.plan.measured
    assert not any(tried.step_ms for tried in auto.plan.tried)
    assert any(note.startswith("Nothing was measured") for note in auto.plan.notes)
    kept = tmp_path / "fasttrain_plan.json"
    again = ft.Auto(1.0)
    fit_with(again, tmp_path)
    assert again.plan is None
    stored = json.loads(kept.read_text())
    kept.write_text(json.dumps({**stored, "batches": stored["batches"] - 1}))  # as of a shorter run
    longer = ft.Auto(1.0)
    fit_with(longer, tmp_path)
    assert longer.plan is not None


class Augmented(list):
    def __getitem__(self, index):
        return float(super().__getitem__(index) + torch.rand(()))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_the_first_batch_leaves_the_run_as_it_was(own, workers):
    orders = []
    for look in (lambda loader: None, first_batch):
        settings = {"num_workers": workers, "persistent_workers": workers > 0}
        generator = torch.Generator() if own else None
        loader = DataLoader(Augmented(range(16)), shuffle=True, generator=generator, **settings)
        torch.manual_seed(2)
        (loader.generator or torch.default_generator).manual_seed(3)
        look(loader)
        orders.append([float(batch) for batch in loader])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("fails", [False, True])
def test_what_auto_has_added_is_undone_at_the_end_and_a_second_fit_is_as_the_first(fails, tmp_path):
    """A budget has its meter open when a run of two steps ends."""

    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if fails and batch_idx == 1:
                raise OSError("as it was told to")

    auto = ft.Auto(1.0)
    auto.choice = Choice(recompute=Budget.within(1.0))
    for _ in range(2):
        net = TwoBlocks()
        t = trainer([auto, Fails()], default_root_dir=tmp_path)
        with pytest.raises(OSError, match="told to") if fails else nullcontext():
            t.fit(net, as_loader(lm_batches(2)))
        assert [type(callback) for callback in t.callbacks] == [ft.Auto, Fails]
        assert not any("forward" in vars(module) for module in net.modules())
        assert not torch.autograd._profiler_enabled()


def test_a_step_that_fails_leaves_no_meter_open():
    class FailsInTheLast(TwoBlocks):
        def training_step(self, batch, batch_idx):
            if torch.autograd._profiler_enabled():
                raise OSError("as it was told to")
            return super().training_step(batch, batch_idx)

    with pytest.raises(OSError, match="told to"):
        Stopwatch(FailsInTheLast(), BATCH, {"accelerator": "cpu"}).time(Choice(), peak=True)
    assert not torch.autograd._profiler_enabled()


def test_auto_comes_first_and_needs_a_batch(tmp_path):
    t = trainer([ft.StepMeter(), ft.Auto()], default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="StepMeter.* is listed before Auto"):
        t.fit(TwoBlocks(), as_loader(lm_batches(1)))
    with pytest.raises(ValueError, match="can be gone through once only"):
        trainer([ft.Auto()], default_root_dir=tmp_path).fit(TwoBlocks(), iter(lm_batches(1)))
    with pytest.raises(ValueError, match="keep='no'"):
        ft.Auto(keep="no")


@pytest.mark.gpu
def test_on_a_gpu_the_plan_fits_and_what_was_predicted_is_measured():
    batch = lm_batches(1, size=256, length=128)[0]
    whole = ft.predict_memory(TwoBlocks(), batch, device="cuda").peak_bytes / GIB
    found = ft.make_plan(TwoBlocks(), batch, 0.9 * whole, keep="exact", seconds=30)
    assert found.measured
    assert found.device == "cuda"
    assert found.chosen.peak_bytes <= found.limit_gib * GIB
