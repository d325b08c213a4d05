"""Batches without samples, without targets, or for which ``training_step`` returns None."""

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


class LossOfSome(torch.nn.Module):
    """A mean over the rows with a label, 0 where there is none; or over all rows, 0 for those without one."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = torch.nn.Linear(4, 3).double(), kind

    def forward(self, batch):
        x, labels = batch
        logits = self.net(x)
        if self.kind == "ignored":
            return torch.nan_to_num(F.cross_entropy(logits, labels))
        if self.kind == "hinge":  # every row counts
            return F.relu(logits[:, 0] + 50.0 * (labels != -100) - 25).mean()
        counted = labels != -100 if self.kind == "masked" else x[:, 0] > 10
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none") * counted
        return losses.sum() / counted.sum().clamp(min=1)


class LitLossOfSome(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = LossOfSome(kind)

    def training_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


def some_labels(counts, rows=4):
    """Batches of which each has a given number of labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.full((len(counts), rows), -100)
    for place, count in enumerate(counts):
        labels[place, :count] = torch.arange(count) % 3
    return list(zip(torch.randn(len(counts), rows, 4, generator=generator).double(), labels, strict=True))


def whole_step(kind, batches):
    """The parameters after one plain step on all rows together."""
    module = LitLossOfSome(kind)
    optimizer = module.configure_optimizers()
    module.net(tuple(map(torch.cat, zip(*batches, strict=True)))).backward()
    optimizer.step()
    return weights(module)


@pytest.mark.parametrize("counts", [(0, 2), (0, 0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("kind", ["ignored", "masked", "hinge"])
def test_a_run_that_begins_without_targets_has_their_weights(kind, counts):
    batches = some_labels(counts)
    right, window = whole_step(kind, batches), len(counts)
    rows = DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), 4)
    for techniques in (
        [ft.TokenWeightedAccumulation(window)],
        [ft.TokenWeightedAccumulation(window), ft.MicroBatching(2)],
        [ft.loaders.GlobalBatch(4 * window)],
    ):
        module = LitLossOfSome(kind)
        trainer(techniques).fit(module, rows)
        assert largest_difference(right, weights(module)) < 1e-12


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["ignored", "masked", "hinge"])
def test_a_window_in_a_loop_that_begins_without_targets(kind, n):
    counts = (0, 2, 1)
    module = LitLossOfSome(kind)
    ft.accumulate_window(module.net, some_labels(counts), n=n)
    torch.optim.SGD(module.parameters(), 1.0).step()
    assert largest_difference(whole_step(kind, some_labels(counts)), weights(module)) < 1e-12


def test_targets_that_tried_samples_do_not_show_count_in_whole_batches():
    (first, labels), *others = some_labels([8, 8], rows=8)
    first[5, 0] = 100.0  # the only row that counts is not among those that are tried
    others[0][0][:, 0] = 100.0
    batches = [(first, labels), *others]
    module = LitLossOfSome("hidden")
    trainer([ft.TokenWeightedAccumulation(2)]).fit(module, as_loader(batches))
    assert largest_difference(whole_step("hidden", batches), weights(module)) < 1e-12
    with pytest.raises(ValueError, match="the first batches of the window have targets"):
        trainer([ft.TokenWeightedAccumulation(2), ft.MicroBatching(2)]).fit(LitLossOfSome("hidden"), as_loader(batches))
