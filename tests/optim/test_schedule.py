"""Schedules against torch's own schedulers and values by hand, also with fewer updates than batches."""

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import lr_scheduler as torchs
from torch.utils.data import DataLoader, IterableDataset

import lightning_fasttrain as ft
from lightning_fasttrain.optim.build_schedule import build_schedule
from lightning_fasttrain.technique.duration import Length, read_length
from tests.support.nets import TinyLM, as_loader, fit, heard, largest_difference, lm_batches, trainer, weights
from tests.support.ranks import run_ranks

BATCHES = lm_batches(5)


def sgd(rate=0.5):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)


def rates_of(optimizer, steps, schedule=None):
    """Return the learning rate of each step; torch's schedulers are stepped."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return rates


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (100, Length(100, "steps")),
        ("10_000", Length(10000, "steps")),
        ("1e3 steps", Length(1000, "steps")),
        ("2ep", Length(2, "epochs")),
        ("0.5 Epochs", Length(0.5, "epochs")),
        ("1,000 samples", Length(1000, "samples")),
        ("1.5e9tok", Length(1.5e9, "tokens")),
        ("5%", Length(0.05, "share")),
    ],
)
def test_lengths_are_parsed(value, length):
    assert read_length("warmup", value) == length


@pytest.mark.parametrize("value", ["", "many", "-5", "5 minutes", "120%", "0.5tok", 0.05, True, None, "1e999", "nan"])
def test_invalid_lengths_are_refused_with_the_accepted_forms(value):
    with pytest.raises(ValueError, match=r"warmup=.*Use "):
        read_length("warmup", value)


TORCHS = {
    "constant": ({}, lambda o: torchs.ConstantLR(o, factor=1.0)),
    "linear": ({"final": 0.1}, lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=20)),
    "cosine": ({"final": 0.1}, lambda o: torchs.CosineAnnealingLR(o, 20, eta_min=0.05)),
    "exponential": ({"final": 0.01}, lambda o: torchs.ExponentialLR(o, 0.01 ** (1 / 20))),
    "step": ({"at": ["30%", 15], "by": 0.5}, lambda o: torchs.MultiStepLR(o, [6, 15], gamma=0.5)),
    "one-cycle": (
        {"final": 4e-6},
        lambda o: torchs.OneCycleLR(o, 0.5, total_steps=20, cycle_momentum=False, pct_start=0.3),
    ),
}


@pytest.mark.parametrize("shape", TORCHS)
def test_shapes_match_torch_schedulers(shape):
    settings, make = TORCHS[shape]
    ours, theirs = sgd(), sgd()
    build_schedule(ours, shape, total=20, **settings)
    assert rates_of(ours, 20) == pytest.approx(rates_of(theirs, 20, make(theirs)), rel=1e-9)


def test_warmup_and_cosine_match_torch_schedulers():
    ours, theirs = sgd(), sgd()
    build_schedule(ours, "cosine", warmup="20%", total=20)
    parts = [torchs.LinearLR(theirs, 1 / 4, 1.0, total_iters=3), torchs.CosineAnnealingLR(theirs, 16)]
    expected = rates_of(theirs, 20, torchs.SequentialLR(theirs, parts, milestones=[4]))
    assert rates_of(ours, 20) == pytest.approx(expected, rel=1e-9)


def test_inverse_square_root_falls_as_one_over_the_root_of_the_step():
    optimizer = sgd(1.0)
    build_schedule(optimizer, "inverse-sqrt", warmup=4)
    rates = rates_of(optimizer, 64)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert [rates[step - 1] for step in (16, 64)] == [1 / 2, 1 / 4]
    assert all(rate * math.sqrt(step) == pytest.approx(2.0) for step, rate in enumerate(rates[4:], start=5))


@pytest.mark.parametrize("shape", ["inverse-sqrt", "one-cycle", "cosine"])
def test_a_share_of_a_short_run_is_at_least_one_step(shape):
    optimizer = sgd(1.0)
    build_schedule(optimizer, shape, warmup="1%", total=9)
    rates = rates_of(optimizer, 9)
    assert max(rates) == rates[0] == 1.0
    assert 0 <= rates[-1] < 0.5


def test_wsd_is_flat_and_falls_at_the_end():
    optimizer = sgd(1.0)
    build_schedule(optimizer, "wsd", warmup=2, total=10, decay="40%", final=0.2)
    assert rates_of(optimizer, 12) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_each_group_keeps_its_own_learning_rate():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": torch.tensor(0.2)}]
    optimizer = torch.optim.AdamW(groups, foreach=False, capturable=False)
    held = optimizer.param_groups[1]["lr"]
    schedule = build_schedule(optimizer, "linear", total=4)
    optimizer.step()
    optimizer.add_param_group({"params": [weights[2]], "lr": 0.4})
    optimizer.step()
    assert [float(rate) for rate in schedule.get_last_lr()] == pytest.approx([0.05, 0.1, 0.2])
    assert optimizer.param_groups[1]["lr"] is held


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shape": "cosinus"}, "Use one of 'constant'"),
        ({"shape": "cosine"}, "the length of the run is unknown"),
        ({"total": "5%"}, "cannot be one itself"),
        ({"total": "1e6tok", "warmup": 100}, "1,000,000 tokens and 100 steps"),
        ({"warmup": "1e6tok"}, "Give total='1e9tok'"),
        ({"shape": "exponential", "total": 9}, "Use final=0.01"),
        ({"shape": "inverse-sqrt"}, "Use warmup=1000"),
        ({"shape": "step", "total": 9}, "its marks are missing"),
        ({"at": [3], "total": 9}, "only 'step'"),
        ({"final": 2, "total": 9}, "a share of the learning rate"),
        ({"shape": "constant", "warmup": "2ep"}, "give total=10_000, or module=self".capitalize()),
    ],
)
def test_invalid_requests_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        build_schedule(sgd(), **settings)


def test_what_lies_beyond_the_end_of_the_run_is_reported():
    with pytest.raises(ValueError, match="a warmup of 100 steps in a run of 10: the learning rate never reaches"):
        build_schedule(sgd(), warmup=100, total=10)
    with pytest.warns(ft.FastTrainWarning, match="at=50 in a run of 10 steps: the learning rate does not fall there"):
        build_schedule(sgd(), "step", at=[5, 50], total=10)
    # A run may be shortened for a test, and trains as the first steps of the long one.
    with pytest.warns(ft.FastTrainWarning, match="a warmup of 100 steps in a run of 1"):
        fit(Scheduled("cosine", warmup=100), lm_batches(1))


class Scheduled(TinyLM):
    """Takes arguments of build_schedule; ``listed``: returns it to Lightning as a list, which means once an epoch."""

    def __init__(self, *shape, rate=1.0, listed=False, fused=False, **settings):
        super().__init__(depth=1)
        self.shape, self.of_schedule, self.listed = shape, settings, listed
        self.of_optimizer = {"lr": rate, "fused": fused}
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), **self.of_optimizer)
        self.schedule = build_schedule(optimizer, *self.shape, **{"module": self, **self.of_schedule})
        return ([optimizer], [self.schedule]) if self.listed else self.schedule.to_lightning()

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def line(total):
    return pytest.approx([1 - k / total for k in range(total)])


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("settings", "callbacks", "total"),
    [
        ({"max_epochs": 2}, [], 10),
        ({"max_epochs": 2, "max_steps": 7}, [], 7),
        ({"max_epochs": -1, "max_steps": 3}, [], 3),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, [], 9),
        ({"max_epochs": 2, "limit_train_batches": 2}, [], 4),
        ({"max_epochs": 3}, [(GradientAccumulationScheduler, {1: 2, 2: 5})], 9),
        ({"max_epochs": 2}, [(ft.TokenWeightedAccumulation, {0: 1, 1: 4})], 7),
        ({"max_epochs": 2}, [(lambda by: ft.TokenWeightedAccumulation(by, by="step"), {0: 1, 3: 2, 5: 3})], 6),
        ({"max_epochs": 1}, [(ft.MicroBatching, 3)], 5),
    ],
)
def test_the_total_is_the_trainers(settings, callbacks, total, listed):
    module = Scheduled("linear", listed=listed)
    t = trainer([make(value) for make, value in callbacks], **settings)
    t.fit(module, as_loader(BATCHES))
    assert t.global_step == total == module.schedule.updates == module.schedule.plan.total
    assert module.rates == line(total)
    assert "setup_data" not in vars(t.fit_loop)


def test_epochs_are_converted_to_steps():
    module = Scheduled("constant", warmup="1.5ep")
    fit(module, BATCHES, max_epochs=2, accumulate_grad_batches=2)
    assert module.schedule.plan.warmup == 4  # 3 steps an epoch


def test_loaders_are_created_once_and_read_as_without_a_schedule():
    class Counted(Scheduled):
        made = read = 0

        def train_dataloader(self):
            self.made += 1
            return as_loader([self.one(batch) for batch in BATCHES])

        def one(self, batch):
            self.read += 1
            return batch

    module = Counted("cosine", warmup="10%")
    trainer(max_epochs=2).fit(module)
    assert (module.made, module.read) == (1, 5)


def test_a_loader_without_a_length_needs_max_steps():
    class Endless(IterableDataset):
        def __iter__(self):
            yield from BATCHES

    loader = DataLoader(Endless(), batch_size=None)
    with pytest.raises(ValueError, match="the length of the run is not known"):
        trainer().fit(Scheduled("cosine"), loader)
    module = Scheduled("linear")
    trainer(max_steps=4).fit(module, loader)
    assert module.rates == line(4)


def test_the_first_learning_rate_is_set_before_logging(tmp_path):
    seen = []

    class Monitor(LearningRateMonitor):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(Scheduled("linear", warmup=2), BATCHES, [Monitor()], logger=L.pytorch.loggers.CSVLogger(tmp_path))
    assert seen == pytest.approx([0.5, 1, 1, 2 / 3, 1 / 3])


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflowing_step_does_not_count(fused):
    """A fused optimizer skips by itself, but its hooks are called."""
    module = Scheduled("linear", total=10, rate=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    t = trainer(max_epochs=2, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    t.fit(module, as_loader(BATCHES))
    taken = int(next(iter(t.optimizers[0].state.values()))["step"])
    assert 0 < taken == module.schedule.updates < t.global_step == 10
    assert module.rates == sorted(module.rates, reverse=True)
    assert sorted({round(1000 * rate) for rate in module.rates}) == list(range(11 - taken, 11))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_a_guard_does_not_count(fused):
    class Breaks(Scheduled):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else 1.0)

    module, guard = Breaks("linear", total=10, rate=0.01, fused=fused), ft.FiniteGuard()
    with pytest.warns(ft.FastTrainWarning, match="a step was skipped"):
        fit(module, BATCHES, [guard])
    assert (module.schedule.updates, guard.skipped, module.trainer.global_step) == (4, 1, 5)


@pytest.mark.parametrize(("name", "settings"), [("muon", {}), ("lion", {}), ("adamw", {"offload": "cpu"})])
def test_a_named_optimizer_is_driven_as_by_torch_schedulers(name, settings):
    class Named(TinyLM):
        def configure_optimizers(self):
            optimizer = ft.build_optimizer(self, name, lr=0.01, **settings)
            if self.ours:
                return build_schedule(optimizer, "linear", module=self).to_lightning()
            falls = torchs.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}

    ours, theirs = Named(), Named()
    ours.ours, theirs.ours = True, False
    fit(ours, BATCHES)
    fit(theirs, BATCHES)
    assert largest_difference(weights(theirs), weights(ours)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflowing_step_on_a_gpu_does_not_count(fused):
    module = Scheduled("linear", total=40, rate=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    t = trainer(max_epochs=4, accelerator="gpu", devices=1, plugins=[MixedPrecision("16-mixed", "cuda", scaler)])
    t.fit(module, as_loader(BATCHES))
    taken = max(int(state["step"]) for state in t.optimizers[0].state.values())
    assert 0 < taken == module.schedule.updates < t.global_step == 20


class Save(L.Callback):
    def __init__(self, path, step):
        self.path, self.at = path, step

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.at and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("total", [None, "240 samples", "300 tok"])
def test_resumed_is_uninterrupted(tmp_path, total):
    path = tmp_path / "half.ckpt"
    whole, resumed = (Scheduled("cosine", warmup="20%", total=total) for _ in range(2))
    fit(whole, BATCHES, [Save(path, 3)], max_epochs=2, accumulate_grad_batches=2)
    with heard() as said:
        t = trainer(max_epochs=2, accumulate_grad_batches=2)
        t.fit(resumed, as_loader(BATCHES), ckpt_path=path, weights_only=True)
    assert resumed.rates == whole.rates[3:]
    assert resumed.schedule.state_dict() == whole.schedule.state_dict()
    assert not any("schedule" in one for one in said)


def test_a_length_that_differs_from_the_checkpoint_is_logged(tmp_path):
    path = tmp_path / "half.ckpt"
    fit(Scheduled("linear"), BATCHES, [Save(path, 5)], max_epochs=2)
    longer = Scheduled("linear")
    with heard() as said:
        trainer(max_epochs=4).fit(longer, as_loader(BATCHES), ckpt_path=path, weights_only=True)
    assert "the schedule's total is now 20, but was 10 in the checkpoint" in said
    assert longer.rates == pytest.approx([1 - k / 20 for k in range(5, 20)])


def test_a_clock_of_samples_counts_short_batches_exactly():
    batches = [*lm_batches(2, size=6), *lm_batches(2, size=3)]
    module = Scheduled("linear", total="18 samples")
    fit(module, batches)
    assert module.rates == pytest.approx([1, 12 / 18, 6 / 18, 3 / 18])
    assert "on_train_batch_start" not in vars(module.trainer.strategy)


def test_a_clock_of_tokens_in_a_loop():
    optimizer = sgd(1.0)
    schedule, rates = build_schedule(optimizer, "linear", warmup="25%", total="40 tok"), []
    for tokens in (5, 10, 10, 15):
        schedule.count(tokens=tokens)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates == pytest.approx([0.5, 1.0, 1 - 5 / 30, 1 - 15 / 30])


def test_a_learning_rate_finder_works_before_the_schedule_starts():
    """The finder steps the same optimizer with its own schedule, in a short run within the run."""

    class Plain(TinyLM):
        lr = 1.0

    class WithRate(Scheduled):
        lr = 1.0

    def finder():
        return LearningRateFinder(num_training_steps=8, min_lr=1e-4, max_lr=1e-2, early_stop_threshold=None)

    plain, beside, module = finder(), finder(), WithRate("linear")
    fit(Plain(), BATCHES, [plain], max_epochs=2)
    fit(module, BATCHES, [beside], max_epochs=2)
    assert beside.optimal_lr.results["lr"] == plain.optimal_lr.results["lr"]
    assert module.rates[-10:] == line(10)


def test_a_schedule_not_returned_to_lightning_is_refused():
    class Keeps(Scheduled):
        def configure_optimizers(self):
            return super().configure_optimizers()["optimizer"]

    with pytest.raises(RuntimeError, match=r"return ft.build_schedule\(...\).to_lightning\(\)"):
        fit(Keeps("linear"), BATCHES)


@pytest.mark.filterwarnings("ignore:.*gradients have been used and freed")  # it reads the rate alone
def test_learning_rates_in_backward_are_those_of_the_plain_step():
    plain, early = Scheduled("cosine", warmup=2), Scheduled("cosine", warmup=2)
    fit(plain, BATCHES)
    fit(early, BATCHES, [ft.OptimizerInBackward()])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), early.parameters(), strict=True))


def test_schedules_work_in_fabric_and_manual_optimization():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    net, optimizer = fabric.setup(TinyLM(depth=1), sgd(1.0))
    schedule = build_schedule(optimizer, "linear", total=4)
    for _ in range(3):
        optimizer.step()
    assert schedule.get_last_lr() == [0.25]
    module = Scheduled("linear")
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization=False"):
        fit(module, BATCHES)


def test_without_a_trainer_a_module_gives_no_length():
    module = Scheduled("linear")
    assert ft.predict_memory(module, BATCHES[0], device="cpu").peak_bytes > 0
    optimizer = module.configure_optimizers()["optimizer"]
    with pytest.raises(RuntimeError, match="Give total=10_000 instead"):
        optimizer.step()


def test_an_empty_first_group_is_supported():
    class EmptyGroup(Scheduled):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD([{"params": []}, {"params": list(self.parameters())}], lr=0.1)
            return ft.build_schedule(optimizer, "linear", module=self).to_lightning()

    module = EmptyGroup("linear")
    assert ft.predict_memory(module, BATCHES[0], device="cpu").peak_bytes > 0
    with pytest.raises(RuntimeError, match="Give total=10_000 instead"):
        module.configure_optimizers()["optimizer"].step()


TWO_RANKS = """
import torch
from tests.support.nets import as_loader, lm_batches, trainer
from tests.optim.test_schedule import Scheduled
import os
rank = int(os.environ["RANK"])
module = Scheduled("linear", total="60 samples")
trainer(devices=2, strategy="ddp").fit(module, as_loader(lm_batches(4, size=6 + 2 * rank)))
assert [round(60 * rate) for rate in module.rates] == [60, 46, 32, 18], module.rates
"""


def test_ranks_count_the_samples_of_all(tmp_path):
    """Ranks have 6 and 8 samples: one that counted its own would use another learning rate."""
    script = tmp_path / "program.py"
    script.write_text(TWO_RANKS)
    run_ranks(str(script), log=tmp_path / "program.log")
