"""A skipped step changes nothing; for two processes see ``steady_scenarios.py``."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

import lightning_fasttrain as ft
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights

BATCHES = [{**batch, "times": torch.ones(6)} for batch in lm_batches(6)]


class Spoilt(ShallowLM):
    """Its loss is not finite for marked batches."""

    def loss(self, batch):
        return super().loss(batch) * batch["times"].mean()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def spoil(batches, *places, value=float("nan")):
    batches = copy.deepcopy(batches)
    for place in places:
        batches[place]["times"] *= value
    return batches


def without(batches, *places):
    return [batch for place, batch in enumerate(batches) if place not in places]


def run(net, batches, guard=None, callbacks=(), **settings):
    torch.manual_seed(11)
    t = trainer([*([guard] if guard else []), *callbacks], **settings)
    t.fit(net, as_loader(batches))
    return t


def same_tensors(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def state_of(t):
    entries = [value for state in t.optimizers[0].state.values() for value in state.values()]
    return [torch.as_tensor(value) for value in entries]


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "fused SGD": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_batch_leaves_weights_state_and_schedule_unchanged(name, place):
    optimizer, settings = OPTIMIZERS[name]
    guard, net, other = ft.FiniteGuard(), *(Spoilt(optimizer=optimizer, **settings) for _ in range(2))
    with pytest.warns(ft.FastTrainWarning, match=f"epoch 0, batch {place}, rank 0, .* could not be reproduced"):
        t = run(net, spoil(BATCHES, place), guard)
    u = run(other, without(BATCHES, place))
    assert largest_difference(weights(net), weights(other)) == 0
    assert same_tensors(state_of(t), state_of(u))
    assert t.lr_scheduler_configs[0].scheduler.last_epoch == u.lr_scheduler_configs[0].scheduler.last_epoch == 5
    assert (guard.skipped, t.global_step, u.global_step) == (1, 6, 5)


@pytest.mark.parametrize("techniques", [[], [ft.MicroBatching(2)]], ids=["Lightning's", "in micro-batches"])
def test_a_window_with_a_bad_batch_is_skipped_completely_and_names_the_batch(techniques):
    guard, net, other = ft.FiniteGuard(), Spoilt(), Spoilt()
    with pytest.warns(ft.FastTrainWarning, match="batch 2, rank 0, in the gradient of"):
        run(net, spoil(BATCHES, 2, value=float("inf")), guard, techniques, accumulate_grad_batches=2)
    run(other, without(BATCHES, 2, 3), None, [copy.deepcopy(t) for t in techniques], accumulate_grad_batches=2)
    assert largest_difference(weights(net), weights(other)) == 0


def test_a_token_weighted_window_is_skipped_too():
    guard, net, other = ft.FiniteGuard(), ShallowLM(), ShallowLM()
    batches = lm_batches(6)
    with pytest.warns(ft.FastTrainWarning, match="batch 2, rank 0"):
        run(Poisoned(net, 2), batches, guard, [ft.TokenWeightedAccumulation(2, check=False)])
    run(other, without(batches, 2, 3), None, [ft.TokenWeightedAccumulation(2, check=False)])
    assert largest_difference(weights(net), weights(other)) <= 1e-6  # sums are close to those of the first batch


def Poisoned(net, place):
    """Return the same net, with a NaN in the loss of one batch."""
    plain = net.training_step

    def training_step(batch, batch_idx):
        return plain(batch, batch_idx) * (float("nan") if batch_idx == place else 1.0)

    net.training_step = training_step
    return net


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Layers(L.LightningModule):
    """NaN in the forward for negative inputs; an infinite gradient, and a finite loss, for zero."""

    def __init__(self):
        super().__init__()
        self.first, self.root, self.norm = nn.Linear(2, 2, bias=False), Root(), nn.BatchNorm1d(2)
        nn.init.eye_(self.first.weight)

    def training_step(self, batch):
        loss = self.norm(self.root(self.first(batch))).square().sum() + self.first.weight.sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


GOOD = [torch.rand(4, 2, generator=torch.Generator().manual_seed(i)) + 0.1 for i in range(3)]


def test_the_layer_of_the_first_nan_is_named_and_the_batch_has_no_effect():
    net, plain, draws = Layers(), Layers(), []
    last = L.pytorch.callbacks.LambdaCallback(on_train_end=lambda *_: draws.append(torch.rand(1)))
    with pytest.warns(ft.FastTrainWarning, match=r"batch 1, rank 0, in the output of root \(Root\)"):
        run(net, [GOOD[0], -GOOD[1], GOOD[2]], ft.FiniteGuard(), [last])
    run(plain, [GOOD[0], GOOD[2]], None, [last])
    assert largest_difference(weights(net), weights(plain)) == 0  # BatchNorm's statistics and count among them
    assert torch.equal(*draws)


def test_a_nan_in_the_backward_is_reported_by_its_gradient():
    zero = GOOD[1].clone()
    zero[0] = 0.0
    with pytest.warns(
        ft.FastTrainWarning, match=r"batch 1, in the backward of a rank, in the gradient of first.weight"
    ):
        run(Layers(), [GOOD[0], zero], ft.FiniteGuard())


def test_a_weight_that_is_already_nan_is_named():
    net = Layers()
    with torch.no_grad():
        net.first.weight[0] = float("nan")
    with (
        pytest.warns(ft.FastTrainWarning, match=r"in a weight of first \(Linear\)"),
        pytest.raises(FloatingPointError, match="2 steps in a row"),
    ):
        run(net, GOOD, ft.FiniteGuard(stop_after=2))


def test_stops_after_consecutive_bad_steps_not_after_the_same_total():
    guard = ft.FiniteGuard(stop_after=2)
    with pytest.warns(ft.FastTrainWarning):
        run(Spoilt(), spoil(BATCHES, 0, 2, 4), guard)
    assert (guard.skipped, guard.steps.in_a_row) == (3, 0)
    with (
        pytest.warns(ft.FastTrainWarning),
        pytest.raises(FloatingPointError, match="batch 3, .*: that is 2 steps in a row"),
    ):
        run(Spoilt(), spoil(BATCHES, 2, 3), ft.FiniteGuard(stop_after=2))


def test_skip_counts_survive_a_resume(tmp_path):
    guard, resumed = ft.FiniteGuard(stop_after=3), ft.FiniteGuard(stop_after=3)
    with pytest.warns(ft.FastTrainWarning):
        t = run(Spoilt(), spoil(BATCHES, 4, 5), guard)
    t.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        trainer([resumed], max_epochs=2).fit(
            Spoilt(), as_loader(spoil(BATCHES, 0)), ckpt_path=tmp_path / "end.ckpt", weights_only=True
        )
    assert resumed.skipped == 3


class Breaks(L.Callback):
    """Sets a weight to NaN, outside of any step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            with torch.no_grad():
                pl_module.head.weight[0, 0] = float("nan")


@pytest.mark.parametrize("atomic", [[], [ft.AtomicCheckpoints()]], ids=["Lightning's", "atomic"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_with_nan_is_never_saved(tmp_path, atomic, weights_only):
    writer = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_weights_only=weights_only)
    with pytest.raises(FloatingPointError, match=r"checkpoint .*step=4.ckpt was not written: .*embed.weight"):
        run(ShallowLM(), BATCHES, ft.FiniteGuard(), [Breaks(), writer, *atomic], enable_checkpointing=True)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=2.ckpt"]


class SaveInWindow(L.Callback):
    """Saves after each batch, in the middle of accumulation windows too."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def test_a_window_that_ends_the_run_is_not_saved(tmp_path):
    """A run that resumed from it would end in the same way, whatever the batch is then."""
    with pytest.raises(FloatingPointError, match=r"2.ckpt was not written: a loss or gradient of this accumulation"):
        run(Spoilt(), spoil(BATCHES, 2), ft.FiniteGuard(1), [SaveInWindow(tmp_path)], accumulate_grad_batches=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.ckpt", "1.ckpt"]


def test_a_window_that_is_skipped_is_skipped_after_a_resume_within_it(tmp_path):
    settings = {"accumulate_grad_batches": 2, "max_epochs": 1}
    callbacks = [ft.ExactResume(), SaveInWindow(tmp_path)]
    guard, resumed, net, again = ft.FiniteGuard(), ft.FiniteGuard(), Spoilt(), Spoilt()
    with pytest.warns(ft.FastTrainWarning, match="not finite"):
        run(net, spoil(BATCHES, 2), guard, callbacks, **settings)
    t = trainer([resumed, ft.ExactResume()], **settings)
    with pytest.warns(ft.FastTrainWarning, match="not finite"):
        t.fit(again, as_loader(spoil(BATCHES, 2)), ckpt_path=tmp_path / "2.ckpt", weights_only=True)
    assert largest_difference(weights(net), weights(again)) == 0
    assert resumed.state_dict() == guard.state_dict()


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_are_left_to_the_loss_scaler_unless_the_loss_is_bad(fused):
    net, guard = ShallowLM(optimizer=torch.optim.AdamW, fused=fused), ft.FiniteGuard()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows gradients in float16
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    before = weights(net)
    run(net, BATCHES[:3], guard, plugins=[precision])
    assert guard.skipped == 0
    assert scaler.get_scale() == 2.0**37
    assert largest_difference(before, weights(net)) == 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    spoilt = Spoilt(optimizer=torch.optim.AdamW, fused=fused)
    with pytest.warns(ft.FastTrainWarning, match="batch 2, rank 0"):
        run(spoilt, spoil(BATCHES, 2), guard, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert guard.skipped == 1


def test_a_gradient_that_overflows_at_a_scale_below_one_is_counted():
    scaler = torch.amp.GradScaler("cpu", init_scale=0.25)
    zero = GOOD[1].clone()
    zero[0] = 0.0
    guard = ft.FiniteGuard()
    with pytest.warns(ft.FastTrainWarning, match="in the gradient of first.weight"):
        run(Layers(), [GOOD[0], zero], guard, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert guard.skipped == 1


def test_guards_a_bare_loop_until_undone():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    steps, own = ft.guards.FiniteSteps(), optimizer.step
    undo = steps.guard_(optimizer, net)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    good = weights(net)
    net(torch.full((1, 2), float("inf"))).sum().backward()
    with pytest.warns(ft.FastTrainWarning, match="not finite"):
        optimizer.step()
    assert largest_difference(good, weights(net)) == 0
    undo()
    assert optimizer.step == own
    assert (steps.skipped, optimizer.state[net.weight]["step"]) == (1, 1)


def test_unsupported_optimizers_and_strategies_are_refused():
    with pytest.raises(TypeError, match="optimizer=LBFGS"):
        ft.guards.FiniteSteps().guard_(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="stop_after=0"):
        ft.FiniteGuard(stop_after=0)
    kind = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    zero = kind.__new__(kind)
    zero.averaged_gradients, zero.bit16_groups = {}, [[nn.Parameter(torch.ones(1, dtype=torch.float16))]]
    with pytest.raises(TypeError, match="guarding the steps of DeepSpeedZeroOptimizer: in float16 DeepSpeed's loss"):
        ft.guards.FiniteSteps().guard_(zero, nn.Linear(1, 1))
    kind = pytest.importorskip("deepspeed.runtime.bf16_optimizer").BF16_Optimizer
    with pytest.raises(TypeError, match="guarding the steps of BF16_Optimizer: DeepSpeed's engine holds the gradients"):
        ft.guards.FiniteSteps().guard_(kind.__new__(kind), nn.Linear(1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_gpu_a_skipped_step_changes_nothing(fused):
    net, other = Spoilt(fused=fused), Spoilt(fused=fused)
    with pytest.warns(ft.FastTrainWarning, match="batch 2"):
        run(net, spoil(BATCHES, 2), ft.FiniteGuard(), accelerator="gpu", devices=1)
    run(other, without(BATCHES, 2), accelerator="gpu", devices=1)
    assert largest_difference(weights(net), weights(other)) == 0


def test_a_rank_without_gradients_uses_the_device_of_its_parameters():
    """On the same kind of device as the other ranks, otherwise a collective would wait for it."""
    groups = [{"params": []}, {"params": [nn.Parameter(torch.ones(2, device="meta"))]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    finite, steady = ft.guards.FiniteSteps(), ft.guards.SteadySteps()
    steady.look(optimizer)
    assert [finite.judge(optimizer).device.type, steady._seen.device.type] == ["meta", "meta"]
