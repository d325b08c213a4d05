"""WeightEMA against Lightning's EMAWeightAveraging, closed forms, and the evaluations that use it."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.optim import WeightEMA, averaged_state_dict
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, trainer, weights

BATCHES = lm_batches(5)


def run(ema, net=TinyLM, **settings):
    module, t = net(), trainer([ema], **settings)
    t.fit(module, as_loader(BATCHES))
    return module, t


def follow(ema, values, dtype=torch.float32):
    """Update the average of one weight that takes these values."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    for value in values:
        nn.init.constant_(net.weight, value)
        ema.update(net)
    return ema.average.get("weight")


def test_the_average_is_lightnings_to_rounding():
    ema, theirs = WeightEMA(0.9), EMAWeightAveraging(decay=0.9)
    run(ema, accumulate_grad_batches=2)
    module, _ = run(theirs, accumulate_grad_batches=2)  # ends with the average in the model
    for name, value in ema.average.items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_updates_start_at_a_step_and_skip_steps():
    assert follow(WeightEMA(0.5, start_step=2), [1.0, 2.0]) is None
    assert follow(WeightEMA(0.5, start_step=2), [1.0, 2.0, 4.0, 8.0]).item() == 6.0
    assert follow(WeightEMA(0.5, every_n_steps=2), [1.0, 100.0, 3.0, 100.0]).item() == 2.0


def test_averages_are_in_the_order_of_the_model():
    net, ema = nn.Sequential(*[nn.Linear(1, 1) for _ in range(8)]), WeightEMA()
    ema.update(net)
    assert list(ema.average) == [name for name, _ in net.named_parameters()]  # that of a set differs between ranks


def test_averages_of_bfloat16_weights_keep_changes_that_bfloat16_rounds_away():
    average = follow(WeightEMA(0.999), [1.0, 2.0], torch.bfloat16)
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(1.001, rel=1e-6)


def test_parameters_that_are_unfrozen_later_are_averaged_from_then_on():
    net, ema = nn.Linear(1, 1), WeightEMA(0.5)
    net.bias.requires_grad_(False)
    ema.update(net)
    assert list(ema.average) == ["weight"]
    net.bias.requires_grad_(True)
    ema.update(net)
    assert torch.equal(ema.average["bias"], net.bias)


class Failing(TinyLM):
    def validation_step(self, batch, batch_idx):
        raise RuntimeError("out of luck")


def test_a_validation_that_fails_leaves_the_trained_weights():
    expected, _ = run(WeightEMA(0.5))
    module = Failing()
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer([WeightEMA(0.5)], num_sanity_val_steps=0).fit(module, as_loader(BATCHES), as_loader(BATCHES))
    assert all(torch.equal(value, weights(module)[name]) for name, value in weights(expected).items())


class Evaluated(TinyLM):
    def test_step(self, batch, batch_idx):
        self.seen = weights(self)["head.weight"]


def test_evaluations_use_the_average_of_the_fit_or_of_their_checkpoint(tmp_path):
    ema = WeightEMA(0.5)
    module, t = run(ema, Evaluated)
    t.save_checkpoint(tmp_path / "last.ckpt")
    after_fit = ema.average["embed.weight"].clone()
    t.test(module, as_loader(BATCHES[:1]), verbose=False)
    assert torch.equal(module.seen, after_fit)
    t.fit_loop.max_epochs = 2
    t.fit(module, as_loader(BATCHES))
    t.test(module, as_loader(BATCHES[:1]), ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False)
    assert torch.equal(module.seen, after_fit)
    other = Evaluated()
    t.test(other, as_loader(BATCHES[:1]), verbose=False)
    assert torch.equal(other.seen, other.head.weight)


def test_averaged_weights_are_read_from_a_checkpoint(tmp_path):
    ema = WeightEMA(0.5)
    module, t = run(ema)
    t.save_checkpoint(tmp_path / "last.ckpt")
    averaged = averaged_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True))
    assert averaged.keys() == module.state_dict().keys()
    assert torch.equal(averaged["head.weight"], ema.average["embed.weight"])
    assert not torch.equal(averaged["head.weight"], module.head.weight)


def test_a_checkpoint_without_averages_is_refused():
    with pytest.raises(ValueError, match="without averages: it was saved without WeightEMA.*Use its state_dict"):
        averaged_state_dict({"state_dict": {}, "callbacks": {"WeightEMA": WeightEMA().state_dict()}})


def test_an_average_in_another_layout_is_refused():
    ema = WeightEMA()
    ema.update(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 2\) on this rank: the parameter has \(2, 1\) here"):
        ema.update(nn.Linear(1, 2))


def test_a_copy_keeps_the_average_without_the_model():
    ema = WeightEMA(0.5)
    run(ema)
    copied = copy.deepcopy(ema)
    assert torch.equal(copied.average["embed.weight"], ema.average["embed.weight"])
    assert copied._of is None


@pytest.mark.parametrize("settings", [{"decay": 0.0}, {"decay": 1.5}, {"start_step": -1}, {"every_n_steps": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        ft.optim.WeightEMA(**settings)


class Validated(TinyLM):
    """Logs a value in validation, and has a loss that is not finite in some batches."""

    def __init__(self, bad=()):
        super().__init__()
        self.bad, self.batch = bad, -1

    def training_step(self, batch, batch_idx):
        self.batch += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.batch in self.bad else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


class SavesInside(L.Callback):
    def __init__(self, path, hook):
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer, module, *_):
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.path, weights_only=self.path.stem == "alone")
            self.during = weights(module)


class Trained(L.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        self.weights = weights(module)


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_end", "on_validation_end"])
@pytest.mark.parametrize("is_first", [True, False], ids=["saves first", "averages first"])
@pytest.mark.parametrize("name", ["all", "alone"])
def test_a_checkpoint_saved_during_an_evaluation_holds_the_trained_weights(hook, is_first, name, tmp_path):
    saves, trained, ema = SavesInside(tmp_path / f"{name}.ckpt", hook), Trained(), WeightEMA(0.5)
    callbacks = [trained, saves, ema] if is_first else [trained, ema, saves]
    module = Validated()
    trainer(callbacks).fit(module, as_loader(BATCHES), as_loader(BATCHES[:1]))
    saved = torch.load(saves.path, weights_only=True)["state_dict"]
    assert largest_difference(saved, trained.weights) == 0
    assert largest_difference(weights(module), trained.weights) == 0
    if hook == "on_validation_batch_end":  # the average is in use again after the save
        assert largest_difference(ema.average, {n: saves.during[n] for n in ema.average}) == 0


@pytest.mark.filterwarnings("ignore:a step was skipped")
def test_a_step_that_a_guard_skips_is_not_averaged():
    averages = []
    for bad, batches in (((2,), BATCHES), ((), BATCHES[:2] + BATCHES[3:])):
        ema = WeightEMA(0.5)
        trainer([ema, ft.guards.FiniteGuard()]).fit(Validated(bad), as_loader(batches))
        averages.append(ema.average)
    assert largest_difference(*averages) == 0


class Overflows(TinyLM):
    """A batch of the run overflows float16; the optimizer may skip the step on its device."""

    def __init__(self, fused):
        super().__init__(
            optimizer=lambda parameters, **settings: torch.optim.AdamW(parameters, fused=fused, **settings)
        )

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 else loss


class FollowsWeights(L.Callback):
    """Averages the weights itself, after each step that has changed them."""

    def on_train_start(self, trainer, pl_module):
        self.before, self.average = weights(pl_module), {}

    def on_train_batch_end(self, trainer, pl_module, *batch):
        now = weights(pl_module)
        if largest_difference(self.before, now) > 0:
            self.average = {name: (value + self.average.get(name, value)) / 2 for name, value in now.items()}
        self.before = now


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_loss_scaler_skips_is_not_averaged(fused):
    ema, follows = WeightEMA(0.5), FollowsWeights()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer([ema, follows], plugins=precision).fit(Overflows(fused), as_loader(BATCHES))
    assert ema.state_dict()["steps"] == len(BATCHES) - 1
    assert largest_difference(ema.average, {name: follows.average[name] for name in ema.average}) <= 1e-6
