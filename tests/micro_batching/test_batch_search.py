"""Later batches are checked for properties that the first one did not show, in the Trainer and in a loop."""

import traceback
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_fasttrain as ft
from lightning_fasttrain.micro_batching import find_backbone
from lightning_fasttrain.micro_batching.find_backbone import BatchSearch, guess_split, is_guess
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError
from lightning_fasttrain.micro_batching.normalizer.split_rule import LossSplit, OtherSplitError
from lightning_fasttrain.trial import try_split
from lightning_fasttrain.trial.try_split import TrialSchedule, TrialStep
from tests.support.nets import Gradients, TinyLM, as_loader, fit, gradients, largest_difference, lm_batches, trainer

BATCHES = 4


class Mixing(L.LightningModule):
    """Samples depend on one another by a strength given in the batch."""

    def __init__(self) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(7)
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 2)
        torch.set_rng_state(state)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, mix = batch
        encoded = self.encoder(x)
        return self.head(encoded - mix * encoded.mean(0)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(mixed_from: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(6, 4, generator=g) + 1 for _ in range(BATCHES)]
    return [(x, torch.full((6, 1), 0.5 * (number >= mixed_from))) for number, x in enumerate(inputs)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances on request only, so that checks take no time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(try_split, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def in_a_loop(clock: Any, given: list[Any]) -> list[dict[str, Tensor]]:
    net, seen = Mixing(), []
    for batch in given:
        clock.now += 1000
        net.zero_grad()
        ft.accumulate_gradients(net.loss, batch, 3)
        seen.append(gradients(net))
    return seen


def unsplit_in_a_loop(given: list[Any]) -> list[dict[str, Tensor]]:
    net, seen = Mixing(), []
    for batch in given:
        net.zero_grad()
        net.loss(batch).backward()
        seen.append(gradients(net))
    return seen


def in_the_trainer(clock: Any, given: list[Any], *techniques: Any) -> list[dict[str, Tensor]]:
    class Passing(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.now += 1000

    seen = Gradients()
    trainer([*techniques, seen, Passing()]).fit(Mixing(), as_loader(given))
    return seen.seen


@pytest.mark.parametrize("mixed_from", [1, 3])  # the second batch, the fourth
def test_a_split_refuted_by_a_later_batch_is_replaced(clock, mixed_from):
    given = batches(mixed_from)
    pairs = [
        (unsplit_in_a_loop(given), in_a_loop(clock, given)),
        (in_the_trainer(clock, given), in_the_trainer(clock, given, ft.MicroBatching(3))),
    ]
    for expected, seen in pairs:
        assert len(expected) == len(seen) == BATCHES
        assert max(map(largest_difference, expected, seen)) < 1e-5


def test_negative_control_without_later_checks_the_gradient_is_wrong(clock):
    given = batches(mixed_from=2)  # between the second batch and the fourth
    difference = largest_difference(unsplit_in_a_loop(given)[2], in_a_loop(clock, given)[2])
    assert difference > 1e-2


def test_an_inconclusive_first_batch_is_followed_by_a_second_search():
    """The loss has several normalizers; the first batch has no gradient to check a rule with."""
    net = Mixing()

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, on = batch
        errors = net.head(net.encoder(x)).square().sum(1)
        few, many = x[:, 0].abs(), x[:, 1].abs()
        return (on[:, 0] * errors * few).sum() / few.sum() + (on[:, 0] * errors * many).sum() / many.sum()

    for number, (x, on) in enumerate(batches(mixed_from=1)):
        net.zero_grad()
        step((x, on)).backward()
        expected = gradients(net)
        net.zero_grad()
        with pytest.warns(ft.FastTrainWarning, match="unchecked") if number == 0 else nullcontext():
            ft.accumulate_gradients(step, (x, on), 3)
        seen = gradients(net)
        assert all(torch.allclose(seen[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def test_checks_of_later_batches_take_at_most_one_percent_of_the_time(clock):
    later = TrialSchedule()
    with later.timed():
        clock.now += 2
    clock.now += 100
    assert [later.is_due(lambda: True) for _ in range(4)] == [False, False, False, False]
    clock.now += 200
    assert [later.is_due(lambda: True) for _ in range(4)] == [False, False, False, True]
    assert not any(later.is_due(lambda: False) for _ in range(8))


def test_an_inconclusive_batch_does_not_change_the_split():
    net = nn.Linear(4, 1)
    batch, nothing = torch.randn(6, 4), torch.zeros(6, 4)  # without a gradient

    def search(batch):
        return BatchSearch(TrialStep(lambda x: (net(x) * x).square().mean(), [net]), batch, 2)

    guess = guess_split()
    found = search(batch).find(guess)
    assert not is_guess(found)
    assert search(nothing).find(found) is found
    assert is_guess(search(nothing).find(guess))
    assert search(nothing).find(guess) is not guess


def test_with_sharded_parameters_no_rank_searches_alone(monkeypatch):
    """Such a rank would wait for the others in its first forward, and they for it in theirs."""
    monkeypatch.setattr(find_backbone, "rank_count", lambda: 2)
    trial_step = TrialStep(lambda batch: pytest.fail("it ran"), gradients=False)
    search = BatchSearch(trial_step, None, 2)
    with pytest.raises(CannotSplitError, match=r"another term.*a single rank cannot run a batch again"):
        search.find_another(LossSplit(None, None), OtherSplitError("it has another term"), 0)


class Broken(TinyLM):
    def training_step(self, batch, batch_idx):
        return self(batch["input_ids"]).mean() * torch.ones(len(batch["labels"]))[99]


@pytest.mark.parametrize(
    "technique",
    [
        ft.MicroBatching(2),
        ft.MicroBatching("auto"),
        ft.MicroBatching(2, through="blocks.*"),
        ft.TokenWeightedAccumulation(2),
        ft.loaders.GlobalBatch(12),
    ],
    ids=str,
)
def test_an_error_of_the_step_is_raised_as_it_is_and_alone(technique):
    with pytest.raises(IndexError, match="index 99 is out of bounds") as raised:
        fit(Broken(), lm_batches(2), [technique])
    lines = "".join(traceback.format_exception(raised.value))
    assert "[99]" in lines
    assert "CannotSplitError" not in lines
