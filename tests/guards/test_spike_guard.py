"""A run that skips or rewinds equals a run without those batches."""

import re

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_fasttrain as ft
from lightning_fasttrain.guards.spike_guard import RunningLimit
from tests.support.nets import ShallowLM, as_loader, largest_difference, lm_batches, trainer, weights

BATCHES = [{**batch, "times": torch.ones(6), "steep": torch.ones(6)} for batch in lm_batches(12)]
SPIKE = 8


class Spiky(ShallowLM):
    """Its loss, or only its gradient, is larger for marked batches."""

    def loss(self, batch):
        loss = super().loss(batch) * batch["times"].mean()
        steeper = loss * batch["steep"].mean()
        return loss.detach() + steeper - steeper.detach()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def with_spike(*places, what="times", by=100.0):
    batches = [dict(batch) for batch in BATCHES]
    for place in places:
        batches[place][what] = batches[place][what] * by
    return batches


def guard(then="skip", **settings):
    return ft.guards.SpikeGuard(then, **{"after": 4, **settings})


def run(batches, callbacks=(), net=Spiky, **settings):
    module = net()
    t = trainer(callbacks, **settings)
    t.fit(module, as_loader(batches))
    return module, t


def test_the_limit_is_that_of_numpys_quantiles():
    values = torch.rand(150, generator=torch.Generator().manual_seed(0)).tolist()
    limit = RunningLimit(far=4.0, window=100, after=2)
    for count, value in enumerate(values, 1):
        limit.add(value)
        if count > 1:
            low, middle, high = np.quantile(values[max(0, count - 100) : count], (0.1, 0.5, 0.9))
            assert limit.value == pytest.approx(middle + 4.0 * (high - low))


def test_the_limit_follows_running_quantiles():
    limit = RunningLimit(far=2, window=5, after=3)
    for value in (100.0, 100.0, 1.0, 2.0, 3.0, 4.0, float("nan"), 5.0):
        limit.add(value)
    assert limit.value == pytest.approx(3 + 2 * (4.6 - 1.4))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("what", "says"), [("times", "loss"), ("steep", "gradient norm")])
def test_a_spike_is_skipped_by_its_norm_before_clipping(what, says, fused):
    steady, kind = guard(), lambda: Spiky(fused=fused)
    with pytest.warns(ft.FastTrainWarning, match=rf"skipped: .*{says} .* epoch 0, batch {SPIKE} \(skipped so far: 1"):
        net, t = run(with_spike(SPIKE, what=what), [steady], kind, gradient_clip_val=0.01)
    other, u = run([*BATCHES[:SPIKE], *BATCHES[SPIKE + 1 :]], (), kind, gradient_clip_val=0.01)
    assert largest_difference(weights(net), weights(other)) == 0
    assert steady.skipped == 1
    assert (
        t.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"]
        == u.lr_scheduler_configs[0].scheduler.last_epoch
        == 11
    )


def test_nothing_is_skipped_without_enough_steps_or_without_spikes():
    steady = guard(after=9)
    run(with_spike(SPIKE), [steady])
    assert steady.skipped == 0
    steady = guard()
    run(BATCHES, [steady])
    assert (steady.skipped, len(steady.state_dict()["values"][0][0])) == (0, 12)


def test_a_sparse_gradient_has_the_norm_of_the_dense_one():
    norms = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Embedding(9, 3, sparse=sparse)
        optimizer, steps = torch.optim.SGD(net.parameters(), lr=0.1), ft.guards.SteadySteps()
        net(torch.tensor([1, 2, 2])).square().sum().backward()
        steps.look(optimizer)
        norms.append(steps._seen[2])
    assert torch.allclose(*norms)
    assert norms[0] > 0


def test_non_finite_values_are_left_to_finite_guard():
    spikes, finite = guard(), ft.FiniteGuard()
    with pytest.warns(ft.FastTrainWarning, match="batch 8, rank 0"):
        net, _ = run(with_spike(SPIKE, by=float("nan")), [spikes, finite])
    assert (spikes.skipped, finite.skipped) == (0, 1)
    other, _ = run([*BATCHES[:SPIKE], *BATCHES[SPIKE + 1 :]])
    assert largest_difference(weights(net), weights(other)) == 0


def writer(folder):
    return ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)


def test_a_rewind_skips_the_data_since_the_checkpoint(tmp_path):
    steady = guard("rewind")
    with pytest.warns(ft.FastTrainWarning) as told:
        net, t = run(with_spike(SPIKE), [steady, writer(tmp_path)], enable_checkpointing=True)
    other, u = run([*BATCHES[:6], *BATCHES[SPIKE + 1 :]])
    assert largest_difference(weights(net), weights(other)) == 0
    assert t.optimizers[0].param_groups[0]["lr"] == u.optimizers[0].param_groups[0]["lr"]
    assert (steady.rewinds, steady.skipped, t.global_step) == (1, 1, 12)
    said = str(told[-1].message)
    assert re.search(r"rewinds from step 9 to .*step=6.ckpt of step 6; batches up to 8 are skipped", said)


@pytest.mark.parametrize("then", ["skip", "rewind"])
@pytest.mark.parametrize("step", [6, 9])
def test_a_run_that_is_resumed_ends_as_the_uninterrupted_one(tmp_path, then, step):
    whole, resumed = guard(then), guard(then)
    with pytest.warns(ft.FastTrainWarning):
        net, _ = run(with_spike(SPIKE), [whole, ft.ExactResume(), writer(tmp_path)], enable_checkpointing=True)
    again = Spiky()
    t = trainer([resumed, ft.ExactResume(), writer(tmp_path)], enable_checkpointing=True)
    with pytest.warns(ft.FastTrainWarning) if step < SPIKE else torch.enable_grad():
        t.fit(again, as_loader(with_spike(SPIKE)), ckpt_path=tmp_path / f"epoch=0-step={step}.ckpt", weights_only=True)
    assert largest_difference(weights(net), weights(again)) == 0
    assert resumed.state_dict() == whole.state_dict()


def test_a_run_that_is_resumed_within_a_window_knows_the_losses_before(tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    whole, resumed = guard(), guard()
    run(BATCHES, [whole, ft.ExactResume(), Save()], accumulate_grad_batches=2)
    t = trainer([resumed, ft.ExactResume()], accumulate_grad_batches=2)
    t.fit(Spiky(), as_loader(BATCHES), ckpt_path=tmp_path / "within.ckpt", weights_only=True)
    assert resumed.state_dict() == whole.state_dict()


def test_without_a_checkpoint_the_step_is_only_skipped_with_a_warning():
    with pytest.warns(ft.FastTrainWarning) as told:
        run(with_spike(SPIKE), [guard("rewind")])
    assert any("no checkpoint was saved yet" in str(one.message) for one in told)


def test_rewinds_and_consecutive_skips_are_limited(tmp_path):
    steady = guard("rewind", most_rewinds=1)
    with (
        pytest.warns(ft.FastTrainWarning),
        pytest.raises(RuntimeError, match="rewinds from step 11 .* it has rewound 1 time already"),
    ):
        run(with_spike(SPIKE, 10), [steady, writer(tmp_path)], enable_checkpointing=True)
    with (
        pytest.warns(ft.FastTrainWarning),
        pytest.raises(RuntimeError, match="batch 9: that is 2 steps in a row"),
    ):
        run(with_spike(SPIKE, 9), [guard(stop_after=2)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"far": 0}, "far=0"), ({"after": 200}, "after=200 with window=100"), ({"then": "stop"}, "then='stop'")],
)
def test_invalid_spike_guard_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ft.guards.SpikeGuard(**settings)


def test_unsupported_runs_are_refused_at_their_start():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="loss scaler"):
        run(BATCHES, [guard()], plugins=[precision])
    with pytest.raises(ValueError, match="then='rewind' under FSDP2Strategy"):
        strategy = ft.FSDP2Strategy(process_group_backend="gloo")
        trainer([guard("rewind")], strategy=strategy, devices=1).fit(ShallowLM(), as_loader(BATCHES))
