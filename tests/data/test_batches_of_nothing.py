"""Batches without samples, without targets, or for which ``training_step`` returns None."""

import pytest
import torch

import lightning_fasttrain as ft
from tests.support.nets import (
    Gradients,
    TinyLM,
    as_loader,
    concatenate,
    gradients,
    largest_difference,
    lm_batches,
    sgd,
    trainer,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
BATCHES = lm_batches(6)
NOTHING = {
    "no samples": lambda batch: {name: value[:0] for name, value in batch.items()},
    "no targets": lambda batch: {**batch, "labels": torch.full_like(batch["labels"], -100)},
    "None": lambda batch: {**batch, "skip": torch.ones(6)},
}
each_kind = pytest.mark.parametrize("kind", NOTHING)


class MaySkip(TinyLM):
    def training_step(self, batch, batch_idx):
        return None if "skip" in batch else super().training_step(batch, batch_idx)


def run(batches, callbacks, **settings):
    module = MaySkip(optimizer=settings.pop("optimizer", torch.optim.AdamW))
    trainer(callbacks, **settings).fit(module, as_loader(batches))
    return module


def with_nothing(kind, place=2):
    return [*BATCHES[:place], NOTHING[kind](BATCHES[place]), *BATCHES[place + 1 :]]


@pytest.mark.parametrize("kind", ["no samples", "no targets"])
def test_the_finite_guard_skips_a_step_without_a_loss(kind):
    with pytest.warns(ft.FastTrainWarning, match="batch 2, rank 0"):
        module = run(with_nothing(kind), [ft.FiniteGuard()])
    plain = run([*BATCHES[:2], *BATCHES[3:]], [])
    assert largest_difference(weights(plain), weights(module)) == 0


def test_lightning_alone_steps_on_zero_gradients():
    """Momentum and weight decay change the weights although gradients are zero."""
    plain = run([*BATCHES[:2], *BATCHES[3:]], [])
    assert largest_difference(weights(plain), weights(run(with_nothing("no samples"), []))) > 1e-4


@each_kind
@pytest.mark.parametrize("techniques", [[], [ft.FiniteGuard()]], ids=["alone", "guarded"])
def test_a_skipped_batch_has_no_weight_in_a_token_weighted_window(kind, techniques):
    seen = Gradients()
    run(with_nothing(kind), [ft.TokenWeightedAccumulation(2), *techniques, seen], optimizer=sgd)
    expected, module = [], TinyLM(optimizer=sgd)
    optimizer = module.configure_optimizers()
    for window in (BATCHES[:2], BATCHES[3:4], BATCHES[4:]):
        optimizer.zero_grad()
        module.loss(concatenate(window)).backward()
        expected.append(gradients(module))
        optimizer.step()
    assert len(seen.seen) == 3
    assert max(map(largest_difference, expected, seen.seen)) < 2e-6


def test_lightnings_window_with_a_missing_loss_is_reported_as_wrong():
    with pytest.warns(ft.FastTrainWarning, match="returned None for batch 2.*TokenWeightedAccumulation"):
        run(with_nothing("None"), [ft.FiniteGuard()], accumulate_grad_batches=2)


def test_a_batch_without_samples_cannot_be_split():
    with pytest.raises(ValueError, match="has 0 samples"):
        run(with_nothing("no samples"), [ft.MicroBatching(2)])


@pytest.mark.parametrize("techniques", [[], [ft.MicroBatching(3)]], ids=["unsplit", "in micro-batches"])
def test_a_batch_without_targets_has_the_loss_and_the_gradient_of_the_unsplit_step(techniques):
    seen = Gradients()
    module = run([BATCHES[0], NOTHING["no targets"](BATCHES[1])], [*techniques, seen], optimizer=sgd)
    assert module.losses[-1].isnan()
    assert all(not gradient.any() for gradient in seen.seen[1].values())
