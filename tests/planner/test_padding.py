"""A plan counts on padding that micro-batches cut off, in time but never in memory."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.planner.candidates import SWITCHES, Axes, Choice, Predictions
from lightning_fasttrain.planner.make_plan import _describe_padding
from lightning_fasttrain.planner.search import Search
from lightning_fasttrain.planner.timing import Costs, Stopwatch, _Watch
from lightning_fasttrain.proof.verification.short_run import Steps, run_steps
from tests.support.nets import ShallowLM, padded_batches

LENGTHS = [32, 32, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]


class Captions(L.LightningModule):
    """Pictures take most of the memory, and only their captions are padded."""

    def __init__(self):
        super().__init__()
        self.see, self.read = nn.Conv2d(3, 8, 3), nn.Embedding(20, 8)

    def training_step(self, batch):
        seen = self.see(batch["picture"]).tanh().square().mean((2, 3))
        mask = (batch["ids"] != 0)[..., None]
        said = (self.read(batch["ids"]) * mask).sum(1)
        return F.mse_loss(said, seen)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Texts(Captions):
    """A layer for each token."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 256)

    def training_step(self, batch):
        logits = self.out(self.read(batch["ids"])).tanh()
        return F.cross_entropy(logits.transpose(1, 2), batch["ids"].masked_fill(batch["ids"] == 0, -100))


def captions(is_with_pictures):
    ids = torch.randint(1, 20, (len(LENGTHS), 32)) * (torch.arange(32)[None] < torch.tensor(LENGTHS)[:, None])
    return {"ids": ids, "picture": torch.rand(len(LENGTHS), 3, 24, 24)} if is_with_pictures else {"ids": ids}


@pytest.mark.parametrize("how", [{"n": 3}, {"max_tokens": 96}], ids=str)
@pytest.mark.parametrize("kind", [Captions, Texts])
def test_a_step_without_padding_takes_no_more_memory_than_was_predicted(kind, how):
    torch.manual_seed(0)
    module, batch, micro = kind(), captions(kind is Captions), ft.MicroBatching(**how)
    watch = _Watch(1, peak=True)
    run_steps(Steps(module, [batch] * 20, {"accelerator": "cpu"}), [micro], watch)
    predicted = ft.predict_memory(module, batch, techniques=[micro], device="cpu").peak_bytes
    assert watch.trimming is not None
    assert watch.trimming.saved > 0.2
    assert watch.peak_bytes <= 1.01 * predicted


class Mean(ShallowLM):
    def loss(self, batch):
        return self(batch["input_ids"]).logsumexp(-1).mean()


@pytest.mark.parametrize(
    ("kind", "limit", "is_measured", "expected"),
    [
        (ShallowLM, 0.7, True, "Padding: the micro-batches cut off 66% of the tokens of the batch."),
        (Mean, 0.7, True, "Padding: micro-batches would keep it, since the gradient then differs"),
        (
            ShallowLM,
            2.0,
            False,
            "66% of the tokens of 1 batch seem to be padding (['input_ids'] = 0): MicroBatching(8)",
        ),
    ],
)
def test_a_plan_states_the_padding_that_its_micro_batches_cut_off(kind, limit, is_measured, expected):
    module, batch = kind(depth=1), padded_batches([8])[0]  # one row of 32 tokens, and seven of 8
    axes = Axes([1, 2, 4], {"precision": ["32-true"]})
    for axis in SWITCHES:
        axes.words[axis] = [""]
    predictions = Predictions(module, batch, "cpu", axes.parts)
    most = limit * predictions.predict(Choice())
    watch = Stopwatch(module, batch, {"accelerator": "cpu"}) if is_measured else None
    settings = {"steps": 100, "seconds": 60, "tell": lambda what: None}
    search = Search(axes, predictions, lambda choice, needed: needed <= most, most / 2**30, watch, **settings)
    chosen = search.run()
    assert (chosen.choice.parts > 1) == is_measured
    assert _describe_padding(chosen, search, batch, None).startswith(expected)


@pytest.mark.parametrize(("fewer", "more"), [(1, 4), (4, 8), (4, 2)])
def test_the_time_of_each_micro_batch_is_learned_beside_the_padding(fewer, more):
    left = {2: 0.8, 4: 0.5, 8: 0.3}
    costs = Costs(left=left)
    times = [100 * left.get(parts, 1) + 2 * parts for parts in (fewer, more)]
    costs.learn(fewer, times[0], more, times[1])
    assert (costs.whole, costs.per_part) == pytest.approx((100, 2))
    assert costs.estimate(Choice(parts=8), 1000) == pytest.approx(46)
