"""A GAN with two optimizers, which steps them itself: guards, meters, resumption and memory work as on anything."""

import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

import lightning_fasttrain as ft
from tests.support.nets import as_loader, largest_difference, trainer, weights

BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


class GAN(L.LightningModule):
    """One update of each network a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        generator_state = torch.get_rng_state()
        torch.manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        torch.set_rng_state(generator_state)

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        noise = torch.randn(len(batch), 3)
        self.toggle_optimizer(of_generator)
        loss = softplus(-self.critic(self.generator(noise))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_critic)
        made = self.critic(self.generator(noise).detach())
        real = self.critic(batch)
        loss = binary_cross_entropy_with_logits(torch.cat([made, real]), torch.cat([0 * made, 0 * real + 1]))
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)

    def predict_step(self, batch, batch_idx):
        return self.critic(batch)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]


def train(callbacks=(), batches=BATCHES, module=None, **settings):
    module = GAN() if module is None else module
    torch.manual_seed(11)
    t = trainer(callbacks, **settings)
    t.fit(module, as_loader(batches))
    return module, t


@pytest.fixture(scope="module")
def plain():
    return weights(train()[0])


TECHNIQUES = {
    "FiniteGuard": lambda folder: ft.FiniteGuard(),
    "SpikeGuard": lambda folder: ft.guards.SpikeGuard(after=3),
    "StepMeter": lambda folder: ft.StepMeter(warmup=1),
    "MemoryMeter": lambda folder: ft.MemoryMeter(),
    "MemoryTimeline": lambda folder: ft.profiling.MemoryTimeline(folder, first_step=1, steps=1),
    "ExactResume": lambda folder: ft.ExactResume(),
    "Preemption": lambda folder: ft.Preemption(folder),
    "EagerGradientRelease": lambda folder: ft.EagerGradientRelease(),
    "DevicePrefetch": lambda folder: ft.DevicePrefetch(),
    "AtomicCheckpoints": lambda folder: ft.AtomicCheckpoints(),
    "WeightClipping": lambda folder: ft.optim.WeightClipping(100.0),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_gan_trains_with_the_technique_as_without(name, plain, tmp_path):
    technique = TECHNIQUES[name](tmp_path)
    module, _ = train([technique])
    assert largest_difference(plain, weights(module)) == 0


def test_the_meters_measure_the_steps_of_a_gan(tmp_path):
    timeline = ft.profiling.MemoryTimeline(tmp_path, first_step=2, steps=2)
    meter = ft.StepMeter(warmup=1)
    train([meter, timeline])
    assert meter.measurements()["step_ms"] > 0
    assert len(timeline.record.steps_ms) == 2
    assert {one.name for one in tmp_path.iterdir()} >= {"memory_timeline.html", "memory_timeline.json"}


def test_a_step_that_is_not_finite_is_skipped_and_both_networks_train_on():
    bad = BATCHES[0] * math.nan  # the critic's loss; that of the generator reads the noise alone
    with pytest.warns(ft.FastTrainWarning, match=r"batch 3, rank 0, in the gradient of critic\.2\.bias"):
        module, _ = train([ft.FiniteGuard()], [*BATCHES[:3], bad, *BATCHES[4:]])
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(value.isfinite().all() for value in weights(module).values())
    with pytest.warns(ft.FastTrainWarning):
        before, _ = train([ft.FiniteGuard()], [*BATCHES[:3], bad])
    for net in ("generator", "critic"):
        assert largest_difference(weights(getattr(before, net)), weights(getattr(module, net))) > 1e-3


class FrozenStep(L.Callback):
    """Gives an optimizer a learning rate of 0 for one batch."""

    def __init__(self, number, batch_idx):
        self.number, self.batch_idx = number, batch_idx

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        for group in trainer.optimizers[self.number].param_groups:
            group["lr"] = 0.0 if batch_idx == self.batch_idx else 0.01


def test_a_spike_of_one_network_skips_the_step_of_its_optimizer_alone(tmp_path):
    class Critical(GAN):
        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]

    steep = [*BATCHES[:4], 1e3 * BATCHES[4], BATCHES[5]]  # the critic sees it, the generator reads the noise alone
    guard = ft.guards.SpikeGuard(after=3)
    with pytest.warns(ft.FastTrainWarning, match="a step was skipped: loss .* exceeds .*batch 4"):
        module, _ = train([guard], steep, Critical())
    expected, _ = train([FrozenStep(1, 4)], steep, Critical())
    assert guard.skipped == 1
    assert largest_difference(weights(expected), weights(module)) == 0
    state = guard.state_dict()["values"]
    assert [len(norms) for _, norms in state] == [6, 5]
    resumed = ft.guards.SpikeGuard(after=3)
    resumed.load_state_dict(guard.state_dict())
    assert resumed.state_dict() == guard.state_dict()


def test_a_resumed_gan_is_bitwise_the_uninterrupted_one(tmp_path, plain):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    train([ft.ExactResume(), Save()])
    module = GAN()
    trainer([ft.ExactResume()]).fit(module, as_loader(BATCHES), ckpt_path=tmp_path / "middle.ckpt")
    assert largest_difference(plain, weights(module)) == 0


@pytest.mark.parametrize(
    ("technique", "instead"),
    [
        (lambda: ft.MicroBatching(2), r"accumulate_gradients\(.*backward=self.manual_backward"),
        (lambda: ft.OptimizerInBackward(), r"optimize_in_backward_\(optimizer\) in on_fit_start"),
        (lambda: ft.TokenWeightedAccumulation(2), "accumulate_window"),
    ],
    ids=["MicroBatching", "OptimizerInBackward", "TokenWeightedAccumulation"],
)
def test_what_cannot_act_by_itself_names_its_function(technique, instead):
    with pytest.raises(ValueError, match=f"automatic_optimization=False.*{instead}"):
        train([technique()])


def test_micro_batches_of_a_gan_are_made_by_hand():
    class ByHand(GAN):
        parts = 1

        def training_step(self, batch, batch_idx):
            of_critic = self.optimizers()[1]

            def step(batch):
                return softplus(-self.critic(batch)).mean()

            of_critic.zero_grad()
            ft.accumulate_gradients(step, batch, self.parts, backward=self.manual_backward)
            of_critic.step()

    class InParts(ByHand):
        parts = 3

    ends = [weights(train(module=kind())[0]) for kind in (ByHand, InParts)]
    assert largest_difference(*ends) < 1e-5
    assert largest_difference(ends[0], weights(GAN())) > 1e-3
