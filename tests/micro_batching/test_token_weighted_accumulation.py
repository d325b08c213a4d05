"""A window of batches trains like their concatenation, for any distribution of targets."""

import lightning as L
import pytest
import torch

import lightning_fasttrain as ft
from tests.support.nets import (
    Gradients,
    TinyLM,
    as_loader,
    concatenate,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    sgd,
    trainer,
    weights,
)


def run(factor, batches, callbacks=(), epochs=1, by="epoch", **settings):
    seen = Gradients()
    t = trainer([seen, ft.TokenWeightedAccumulation(factor, by=by), *callbacks], max_epochs=epochs, **settings)
    module = TinyLM(optimizer=sgd)
    t.fit(module, as_loader(batches))
    return seen.seen, module, t


def reference(windows):
    """Train in plain PyTorch: one step per window, on the concatenation of its batches."""
    module, expected = TinyLM(optimizer=sgd), []
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        module.loss(concatenate(window)).backward()
        expected.append(gradients(module))
        optimizer.step()
    return expected, module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "micro", [(), (ft.MicroBatching(3),), (ft.EagerGradientRelease(),)], ids=["alone", "micro", "release"]
)
def test_windows_equal_concatenated_batches_including_the_last(micro, precision):
    b = [*lm_batches(4), *lm_batches(1, size=2, seed=8)]
    expected, _ = reference([b[0:2], b[2:4], b[4:5]])
    seen, _, t = run(2, b, micro, precision=precision)
    assert t.global_step == 3
    assert max(map(largest_difference, expected[:1], seen[:1])) < (2e-6 if precision == "32-true" else 1.6e-2)
    if precision == "32-true":
        assert max(map(largest_difference, expected, seen)) < 2e-6


def test_parameters_in_bfloat16():
    b = lm_batches(4)
    expected, _ = reference([b[0:2], b[2:4]])
    seen, _, _ = run(2, b, [ft.MicroBatching(2)], precision="bf16-true")
    assert seen[0]["embed.weight"].dtype is torch.bfloat16
    assert largest_difference(expected[0], seen[0]) < 3e-2


def test_negative_control_lightnings_own_accumulation_differs():
    b = lm_batches(5)
    expected, _ = reference([b[0:2], b[2:4], b[4:5]])
    seen, module = Gradients(), TinyLM(optimizer=sgd)
    trainer([seen], accumulate_grad_batches=2).fit(module, as_loader(b))
    assert largest_difference(expected[2], seen.seen[2]) > 0.1  # the short tail is halved


def test_schedule_by_epoch():
    b = lm_batches(4)
    expected, module = reference([[b[0]], [b[1]], [b[2]], [b[3]], b[0:3], b[3:4]])
    seen, trained, t = run({0: 1, 1: 3}, b, epochs=2)
    assert t.global_step == 6
    assert max(map(largest_difference, expected, seen)) < 1e-5
    assert largest_difference(weights(module), weights(trained)) < 1e-5


def test_schedule_by_step_changes_inside_an_epoch():
    b = lm_batches(8)
    expected, _ = reference([[b[0]], b[1:3], b[3:6], b[6:8]])
    seen, _, t = run({0: 1, 1: 2, 2: 3}, b, by="step")
    assert t.global_step == 4
    assert max(map(largest_difference, expected, seen)) < 1e-5


def test_clipping_and_callbacks_see_the_finished_gradient():
    b = lm_batches(2)
    expected, _ = reference([b])
    before_ours, after_ours = Gradients(), Gradients()
    t = trainer([before_ours, ft.TokenWeightedAccumulation(2), after_ours], gradient_clip_val=1e-3)
    t.fit(TinyLM(optimizer=sgd), as_loader(b))
    for seen in (before_ours, after_ours):
        assert largest_difference(expected[0], seen.seen[0]) < 2e-6


def test_a_schedule_steps_once_per_window_with_the_right_total():
    class Net(TinyLM):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 3
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    t = trainer([ft.TokenWeightedAccumulation(2)])
    t.fit(Net(), as_loader(lm_batches(5)))
    assert t.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 / 4)


class StatefulLoader:
    """A loader that resumes at its position, like torchdata's."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        start, self.at = self.at, 0
        for i in range(start, len(self.batches)):
            self.at = i + 1
            yield self.batches[i]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class SaveAt(L.Callback):
    def __init__(self, batch_idx, path):
        self.batch_idx, self.path = batch_idx, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_checkpoint_inside_a_window_resumes_bitwise(at, tmp_path):
    path, b = tmp_path / "at.ckpt", lm_batches(6)
    whole = TinyLM()
    trainer([ft.TokenWeightedAccumulation(3), SaveAt(at, path)]).fit(whole, StatefulLoader(b))
    resumed = TinyLM()
    t = trainer([ft.TokenWeightedAccumulation(3)])
    t.fit(resumed, StatefulLoader(b), ckpt_path=path, weights_only=True)
    assert t.global_step == 2
    assert largest_difference(weights(whole), weights(resumed)) == 0


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (0, "factor=0"),
        ({1: 2}, "has no first factor"),
        ({0: 1, -3: 2}, "-3 is not a valid epoch"),
        ({0: 0}, "factor=0"),
    ],
)
def test_invalid_factors_are_refused(factor, message):
    with pytest.raises(ValueError, match=message):
        ft.TokenWeightedAccumulation(factor)


def test_a_second_accumulation_is_refused():
    with pytest.raises(ValueError, match="accumulate_grad_batches=4: both would decide when to step"):
        fit(TinyLM(), lm_batches(1), [ft.TokenWeightedAccumulation(2)], accumulate_grad_batches=4)
    scheduler = L.pytorch.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="TokenWeightedAccumulation with GradientAccumulationScheduler"):
        fit(TinyLM(), lm_batches(1), [ft.TokenWeightedAccumulation(2), scheduler])


@pytest.mark.parametrize("kind", [ft.TokenWeightedAccumulation, ft.loaders.GlobalBatch], ids=lambda kind: kind.__name__)
def test_lbfgs_which_computes_gradients_again_is_refused(kind):
    net = TinyLM(optimizer=lambda parameters, **_: torch.optim.LBFGS(parameters))
    with pytest.raises(TypeError, match=f"{kind.__name__} with LBFGS: it computes the gradient several times"):
        fit(net, lm_batches(4), [kind(4)])
