"""What techniques would take hold of, asked ahead of a fit, within one, and without a Trainer."""

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.technique.run_summary import Explanation
from tests.support.nets import LazyLM, TinyLM, as_loader, heard, largest_difference, lm_batches, trainer, weights

BATCH = lm_batches(1)[0]


def some_techniques():
    return [ft.MicroBatching(2), ft.LoRA(rank=2), ft.FusedLossHead("head"), ft.ActivationCheckpointing()]


@pytest.mark.parametrize("net", [TinyLM, LazyLM])
def test_an_explanation_before_a_fit_is_that_of_the_fit(net):
    t = trainer(some_techniques(), enable_model_summary=True, accumulate_grad_batches=3)
    module = net()
    ahead = ft.planner.explain(module, BATCH, trainer=t)
    with heard() as said:
        t.fit(module, as_loader([BATCH] * 3))
    block = next(text for text in said if text.startswith("4 techniques"))
    assert without_memory(str(ahead)) == without_memory(block)
    assert ahead.exactness == "changes_training"
    assert (ahead.samples_per_step, ahead.tokens_per_step) == (18, 90)


def without_memory(block):
    return [line for line in block.splitlines() if "  Memory " not in line]


def test_the_model_and_the_techniques_are_left_as_they_were():
    module, techniques = TinyLM(), some_techniques()
    before = weights(module)
    ft.planner.explain(module, BATCH, techniques)
    assert largest_difference(before, weights(module)) == 0
    assert not [m for m in module.modules() if "forward" in vars(m)]
    assert all(parameter.requires_grad for parameter in module.parameters())
    trainer(techniques).fit(module, as_loader([BATCH]))


def test_with_a_batch_the_peak_is_predicted():
    module, techniques = TinyLM(), [ft.ActivationCheckpointing()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = ft.predict_memory(module, BATCH, techniques=techniques, device=device).peak_bytes
    assert ft.planner.explain(module, BATCH, techniques).predicted_bytes == expected
    assert ft.planner.explain(module, techniques=techniques).predicted_bytes is None


@pytest.mark.parametrize(
    ("module", "techniques", "why"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [], "only a LightningModule has"),
        (TinyLM(), [ft.ActivationCheckpointing(ft.MemoryBudget(1.0))], "it measures the first steps"),
    ],
    ids=["no loss", "measures"],
)
def test_an_explanation_states_why_nothing_was_predicted(module, techniques, why):
    found = ft.planner.explain(module, BATCH, techniques)
    assert why in found.why_unpredicted
    assert f"not predicted, since {found.why_unpredicted}" in str(found)


def test_within_a_fit_the_trainer_is_enough():
    class Ask(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.found = ft.planner.explain(trainer, batch)

    ask = Ask()
    t = trainer([ask, *some_techniques()])
    t.fit(TinyLM(), as_loader([BATCH]))
    holds = {one.name: one.holds for one in ask.found.techniques}
    assert holds["ActivationCheckpointing"] == "3 blocks of Block recomputed"
    assert holds["LoRA"] == "rank 2 beside 6 layers"
    assert ask.found.predicted_bytes > 0


def test_what_a_module_brings_is_found():
    class Bringing(ft.FastTrainMixin, TinyLM):
        techniques = (ft.ActivationCheckpointing(),)

    assert [one.name for one in ft.planner.explain(Bringing()).techniques] == ["ActivationCheckpointing"]
    both = ft.planner.explain(Bringing(), trainer=trainer([ft.MicroBatching(2)]))
    assert [one.name for one in both.techniques] == ["ActivationCheckpointing", "MicroBatching"]


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="a Trainer without a model: .* Give both"):
        ft.planner.explain(trainer())
    with pytest.raises(ValueError, match="listed twice"):
        ft.planner.explain(TinyLM(), techniques=[ft.MicroBatching(2), ft.MicroBatching(3)])
    with pytest.raises(ValueError, match="precision='fp7'"):
        ft.planner.explain(TinyLM(), precision="fp7")
    with pytest.raises(ValueError, match="no repeated blocks"):
        ft.planner.explain(nn.Linear(2, 2), techniques=[ft.ActivationCheckpointing()])


def test_an_explanation_converts_to_plain_json():
    found = Explanation((), 1, 2, "32-true", "DDPStrategy", "cpu", ranks=2, samples=3, tokens=12, accumulation=4)
    assert found.as_dict()["samples_per_step"] == 24
    assert found.as_dict()["tokens_per_step"] == 96
    assert "24 samples (96 tokens) = 2 ranks × 3 samples × 4 accumulated batches" in str(found)
