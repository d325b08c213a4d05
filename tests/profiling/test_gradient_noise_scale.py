"""The gradient noise scale is that of a regression whose gradient covariance is known in closed form."""

import math

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.profiling import GradientNoiseScale, NoiseScale, split_gradient_noise
from tests.support.nets import ShallowLM, as_loader, fit, largest_difference, lm_batches, trainer, weights

WIDTH, SIGMA = 4, 0.5
TRUE = torch.tensor([1.0, -2.0, 0.5, 1.5])


class Regression(L.LightningModule):
    """Half the squared error of x·w, at w = 0 and with a learning rate of 0, so that each step measures the same."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (x @ self.w - y).square().mean() / 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


# A sample's gradient at w = 0 is -x (x·t + e), with x ~ N(0, I) and e ~ N(0, σ²). Its mean is -t, and as
# E[x xᵀ (x·t)²] = |t|² I + 2 t tᵀ, its covariance is (|t|² + σ²) I + t tᵀ.
SIGNAL = float(TRUE @ TRUE)
NOISE = WIDTH * (SIGNAL + SIGMA**2) + SIGNAL


def regression_batches(count, size):
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        x = torch.randn(size, WIDTH, generator=generator)
        batches.append((x, x @ TRUE + SIGMA * torch.randn(size, generator=generator)))
    return batches


def test_parts_of_equal_size_give_the_formula_of_the_paper():
    small, large, parts, whole = 8.0, 32.0, torch.tensor([5.0, 7.0, 6.0, 8.0]), torch.tensor(3.0)
    signal, noise = split_gradient_noise(parts, torch.full((4,), small), whole)
    of_small = parts.mean()
    assert float(signal) == pytest.approx(float((large * whole - small * of_small) / (large - small)))
    assert float(noise) == pytest.approx(float((of_small - whole) / (1 / small - 1 / large)))


def test_parts_of_unequal_size_are_unbiased():
    sizes, signal, noise = torch.tensor([2.0, 6.0, 8.0]), 3.0, 40.0
    expected = signal + noise / sizes  # of a squared norm: |G|² + tr(Σ) / B
    found = split_gradient_noise(expected, sizes, torch.tensor(signal + noise / 16))
    assert [float(value) for value in found] == pytest.approx([signal, noise], rel=1e-5)


@pytest.mark.parametrize(
    ("batch", "techniques", "settings"),
    [
        (8, [], {"accumulate_grad_batches": 2}),
        (16, [ft.MicroBatching(4)], {}),
        (4, [ft.TokenWeightedAccumulation(4)], {}),
        (8, [ft.MicroBatching(2)], {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        (8, [], {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ],
    ids=["accumulation", "micro-batches", "windows", "both in bfloat16", "before clipping"],
)
def test_the_noise_scale_of_a_regression_is_its_closed_form(batch, techniques, settings):
    noise = GradientNoiseScale(every_n_steps=1, decay=0.995)
    fit(Regression(), regression_batches(3200 // batch, batch), [noise, *techniques], **settings)
    state = noise.state_dict()
    # Averages begin at zero.
    filled = 1 - 0.995 ** state["measured"]
    assert state["signal"] / filled == pytest.approx(SIGNAL, rel=0.15)
    assert state["noise"] / filled == pytest.approx(NOISE, rel=0.15)
    assert noise.samples == pytest.approx(NOISE / SIGNAL, rel=0.25)


def test_a_loop_measures_what_the_trainer_does():
    batches = lm_batches(6)
    noise = GradientNoiseScale(every_n_steps=1)
    fit(ShallowLM(), batches, [noise], accumulate_grad_batches=2)
    model = ShallowLM()
    loop, optimizer = NoiseScale(model), model.configure_optimizers()
    step = loop.watch(model.loss)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        with loop.measure():
            (step(first) / 2).backward()
            (step(second) / 2).backward()
        optimizer.step()
    assert loop.samples is not None
    assert loop.samples == pytest.approx(noise.samples, rel=1e-4)
    assert loop.tokens == pytest.approx(5 * loop.samples)
    assert noise.tokens == pytest.approx(loop.tokens, rel=1e-4)


def test_the_gradients_of_parts_are_those_of_autograd():
    """Against each part's gradient, computed by itself and stored."""
    batches, model = lm_batches(2), ShallowLM()
    norms = []
    for batch in batches:
        gradients = torch.autograd.grad(model.loss(batch), list(model.parameters()))
        norms.append(sum(gradient.square().sum() for gradient in gradients))
    whole = torch.autograd.grad((model.loss(batches[0]) + model.loss(batches[1])) / 2, list(model.parameters()))
    total = torch.cat([gradient.flatten() for gradient in whole]).square().sum()
    expected = split_gradient_noise(torch.stack(norms), torch.full((2,), 6.0), total)
    noise = NoiseScale(model, decay=0.0)
    step = noise.watch(model.loss)
    with noise.measure():
        for batch in batches:
            (step(batch) / 2).backward()
    assert noise.averages().wait() == pytest.approx([float(value) for value in expected], rel=1e-4)


@pytest.mark.parametrize("techniques", [[], [ft.MicroBatching(2)]], ids=["batches", "micro-batches"])
def test_training_is_bitwise_the_same(techniques):
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    plain = fit(ShallowLM(), lm_batches(6), techniques, **settings)
    measured = fit(ShallowLM(), lm_batches(6), [GradientNoiseScale(every_n_steps=1), *techniques], **settings)
    assert largest_difference(weights(plain), weights(measured)) == 0
    assert "training_step" not in vars(measured)


def test_nothing_is_left_after_a_failed_step():
    class Fails(ShallowLM):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise OSError("the disk is full")
            return loss

    net, noise = Fails(), GradientNoiseScale(every_n_steps=1)
    with pytest.raises(OSError, match="disk"):
        fit(net, lm_batches(4), [noise], accumulate_grad_batches=2)
    assert "training_step" not in vars(net)
    assert noise.samples is None


def test_only_every_nth_step_is_measured():
    noise = GradientNoiseScale(every_n_steps=2)
    fit(ShallowLM(), lm_batches(10), [noise], accumulate_grad_batches=2)
    assert noise.state_dict()["measured"] == 3


def test_a_step_that_was_cut_is_not_measured_where_it_is_resumed(tmp_path):
    class SaveInside(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    whole, resumed = GradientNoiseScale(every_n_steps=1), GradientNoiseScale(every_n_steps=1)
    settings = {"accumulate_grad_batches": 4}
    fit(ShallowLM(), lm_batches(8), [whole, ft.ExactResume(), SaveInside()], **settings)
    rest = trainer([resumed, ft.ExactResume()], **settings)
    rest.fit(ShallowLM(), as_loader(lm_batches(8)), ckpt_path=tmp_path / "inside.ckpt", weights_only=True)
    assert whole.state_dict()["measured"] == 2
    assert resumed.state_dict()["measured"] == 1  # the second step, of which all parts are known


def test_a_single_gradient_shows_no_noise():
    noise = GradientNoiseScale(every_n_steps=1)
    fit(ShallowLM(), lm_batches(3), [noise])
    assert noise.samples is None
    assert "nothing was measured: each step has the gradient of one batch" in noise.outcome(ShallowLM())


def test_a_step_without_number_is_left_out():
    noise = NoiseScale(net := nn.Linear(1, 1), decay=0.0)
    step = noise.watch(lambda batch: net(batch).square().mean())
    found = []
    for value in (math.nan, 1.0, math.nan):
        net.zero_grad()
        with noise.measure():
            for scale in (1.0, 2.0):
                (step(torch.full((4, 1), scale * value)) / 2).backward()
        found.append(noise.samples)
    assert found[0] is None
    assert math.isfinite(found[1])
    assert found[2] == found[1]


def test_a_run_whose_gradients_were_never_finite_says_so():
    class Broken(ShallowLM):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * math.nan

    noise = GradientNoiseScale(every_n_steps=1)
    fit(Broken(), lm_batches(4), [noise], accumulate_grad_batches=2)
    assert noise.samples is None
    assert noise.outcome(ShallowLM()) == "nothing was measured: 2 steps had no finite gradients"


def test_a_loss_that_is_not_watched_is_refused():
    net = nn.Linear(1, 1)
    noise = NoiseScale(net)
    with (
        pytest.raises(RuntimeError, match=r"its weight in the step is unknown\. Use step = noise\.watch"),
        noise.measure(),
    ):
        net(torch.ones(1, 1)).sum().backward()


def test_it_is_logged(tmp_path):
    logged = {}

    class Logger(L.pytorch.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            logged.update(metrics)

    t = trainer(
        [GradientNoiseScale(every_n_steps=1)],
        logger=Logger(tmp_path), log_every_n_steps=1, accumulate_grad_batches=2,
    )  # fmt: skip
    t.fit(ShallowLM(), as_loader(lm_batches(4)))
    assert logged["gradient_noise_scale/tokens"] == pytest.approx(5 * logged["gradient_noise_scale/samples"])


def test_manual_optimization_is_refused():
    net = ShallowLM()
    net.automatic_optimization = False
    with pytest.raises(ValueError, match=r"runs its backwards itself.*NoiseScale\(self\)\.measure"):
        fit(net, lm_batches(1), [GradientNoiseScale()])
