"""Faults that users meet: each is survived with the right numbers, or refused in words that help."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_fasttrain as ft
from tests.support.nets import DIM, VOCAB, TinyLM, as_loader, fit, largest_difference, lm_batches, trainer, weights


class Hungry(TinyLM):
    """Runs out of memory with more than two samples from the third batch on, having used everything by then.

    Its loss has a term over samples beside one over targets, so no count splits it exactly.
    """

    def __init__(self, limit=None, **kwargs):
        super().__init__(dropout=0.3, **kwargs)
        self.limit, self.calls = limit, 0
        self.norm = nn.BatchNorm1d(DIM)
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["input_ids"]).flatten(0, 1)
        noise = random.random() + np.random.rand()
        loss = self.loss(batch) + 0.01 * noise * self.norm(hidden).pow(2).mean()
        self.accuracy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.calls += 1
        if batch_idx >= 2 and self.limit is not None and len(batch["labels"]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory (staged)")
        return loss


def run(module, technique, **settings):
    random.seed(5)
    np.random.seed(5)
    t = trainer([technique], **settings)
    torch.manual_seed(5)
    t.fit(module, as_loader(lm_batches(4, size=6)))
    return {**weights(module), "accuracy": t.callback_metrics["accuracy"], "rng": torch.rand(1)}


def micro_batching(n="auto"):
    return ft.MicroBatching(n, count="targets", check=False)


@pytest.mark.filterwarnings("ignore:MicroBatching.*BatchNorm")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_out_of_memory_is_retried_as_if_it_had_not_been(accumulate):
    class Clean(Hungry):  # a run that knows beforehand from which batch on it must split
        def on_train_batch_start(self, batch, batch_idx):
            technique.n = 1 if batch_idx < 2 else 4

    technique = micro_batching(1)
    expected = run(Clean(), technique, accumulate_grad_batches=accumulate)
    auto = micro_batching()
    seen = run(Hungry(limit=2), auto, accumulate_grad_batches=accumulate)
    assert auto.n == 4
    assert largest_difference(expected, seen) == 0


@pytest.mark.filterwarnings("ignore:MicroBatching.*BatchNorm")
def test_negative_control_without_putting_back_the_retry_differs(monkeypatch):
    def careless(attempt, model, n, most, **settings):
        while True:
            try:
                return attempt(n), n
            except torch.OutOfMemoryError:
                n *= 2

    careful = run(Hungry(limit=2), micro_batching())
    monkeypatch.setattr("lightning_fasttrain.micro_batching.micro_batch_closure.split_until_it_fits", careless)
    assert largest_difference(careful, run(Hungry(limit=2), micro_batching())) > 1e-4


@pytest.mark.filterwarnings("ignore:MicroBatching.*BatchNorm")
def test_out_of_memory_with_one_sample_is_raised_with_what_to_do_next():
    module = Hungry(limit=0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(module, micro_batching())
    assert "one sample each. Next: then=[ActivationCheckpointing()" in caught.value.__notes__[0]
    assert "log" not in vars(module)


def test_the_number_that_fitted_is_in_the_checkpoint(tmp_path):
    auto = ft.MicroBatching("auto")
    auto.n = 4
    t = trainer([auto])
    t.fit(TinyLM(), as_loader(lm_batches(1)))
    t.save_checkpoint(tmp_path / "a.ckpt")
    again = ft.MicroBatching("auto")
    trainer([again], max_epochs=2).fit(TinyLM(), as_loader(lm_batches(1)), ckpt_path=tmp_path / "a.ckpt")
    assert again.n == 4


def test_float16_on_a_cpu_is_said_to_be_bfloat16():
    with pytest.warns(UserWarning, match="fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
        fit(TinyLM(), lm_batches(1), [ft.MicroBatching(2)], precision="16-mixed")


def test_float16_weights_on_a_cpu_are_refused():
    with pytest.raises(ValueError, match="precision='16-true' on a CPU: .* Use precision='bf16-true'"):
        fit(TinyLM(), lm_batches(1), [ft.MicroBatching(2)], precision="16-true")


@pytest.mark.filterwarnings("ignore:Total length of")
def test_an_empty_loader_is_said():
    with pytest.warns(ft.FastTrainWarning, match="fit trained nothing: the training loader is empty"):
        fit(TinyLM(), [], [ft.MicroBatching(2)])


@pytest.mark.parametrize(
    "technique", [lambda: ft.MicroBatching(3), ft.ActivationCheckpointing], ids=["micro", "recompute"]
)
def test_frozen_unused_and_shared_parameters_train_as_plain(technique):
    class Net(TinyLM):
        def build(self):
            super().build()
            self.unused = nn.LayerNorm(3)
            self.embed.weight.requires_grad_(False)  # shared with the head
            self.blocks[1].requires_grad_(False)

    plain, ours = fit(Net(), lm_batches(3)), fit(Net(), lm_batches(3), [technique()])
    assert largest_difference(weights(plain), weights(ours)) < 1e-5
    assert torch.equal(plain.blocks[1].up.weight, TinyLM().blocks[1].up.weight)


def test_a_storm_of_recompilations_is_said():
    torch._dynamo.reset()
    batches = [lm_batches(1, length=n)[0] for n in range(2, 14)]
    with pytest.warns(ft.FastTrainWarning, match=r"recompilations: .*Pad batches to a few sequence lengths"):
        fit(TinyLM(), batches, [ft.CompileBlocks(backend="eager", dynamic=False)])


def test_techniques_and_their_checkpoints_hold_plain_values_only(tmp_path):
    techniques = [ft.TokenWeightedAccumulation(3), ft.MicroBatching("auto"), ft.StepMeter()]

    class SaveInside(ft.Technique):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    fit(TinyLM(), lm_batches(4), [*techniques, SaveInside()])
    content = torch.load(tmp_path / "inside.ckpt", weights_only=True)
    assert content["TokenWeightedAccumulation"]["batches"] == 2
    assert set(content["TokenWeightedAccumulation"]["grads"]) <= set(dict(TinyLM().named_parameters()))
