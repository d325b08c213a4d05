"""Small models of many families: blocks, recomputation, parts of a batch, adapters and the predicted peak."""

import copy
from collections import Counter

import pytest
import torch

import lightning_fasttrain as ft
from tests.support.families import FAMILIES, built
from tests.support.nets import gradients, largest_difference

each = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
PREDICTED = {"AlbertForSequenceClassification", "DebertaV2ForSequenceClassification", "ViTForImageClassification"} | {
    *("ResNetForImageClassification", "ConvNet", "Recurrent", "OneLSTM"),
    *("Graph", "Perceptron", "Mixer"),
}


def loss_and_gradients(family, model, seed=3):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = family.loss(model, family.batch)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@each
def test_blocks_of_every_kind_are_found_or_refused(family):
    model = built(family.name)
    if not family.blocks:
        with pytest.raises(ValueError, match="no repeated blocks"):
            ft.model.find_blocks(model)
        return
    found = ft.model.find_blocks(model)
    assert Counter(type(block).__name__ for block in found.values()) == family.blocks
    assert not any(name.startswith(f"{other}.") for name in found for other in found)
    assert list(found) == [name for name, _ in model.named_modules() if name in found]


@each
def test_checkpointing_is_bitwise_equal_with_dropout_and_runs_every_block_again(family, monkeypatch):
    if not family.blocks:
        pytest.skip("there are no blocks")
    model = built(family.name)
    switch_cache_off(model, monkeypatch)
    plain, once = counted(family, model)
    with ft.apply(model, [ft.ActivationCheckpointing()]):
        recomputed, twice = counted(family, model)
    assert plain.keys() == recomputed.keys()
    assert [name for name in plain if not torch.equal(plain[name], recomputed[name])] == []
    made_of_layers = [
        name for name, block in ft.model.find_blocks(model).items() if any(True for _ in block.children())
    ]
    assert list(once) == made_of_layers
    # Recomputation stops where it has all that it wants, so the last layers of a block may not run again.
    assert all(twice[name] > once[name] for name in once)


def switch_cache_off(model, monkeypatch):
    """As checkpointing does. A cache copies keys and values, whose sums some CPUs then take in another order."""
    for config in [getattr(module, "config", None) for module in model.modules()]:
        if getattr(config, "use_cache", False):
            monkeypatch.setattr(config, "use_cache", False)


def counted(family, model):
    """Loss and gradients, and how often layers were called in each block."""
    calls, hooks = Counter(), []
    for name, block in ft.model.find_blocks(model).items():
        for layer in block.modules():
            if layer is not block:
                hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: calls.update([name])))
    result = loss_and_gradients(family, model)
    for hook in hooks:
        hook.remove()
    return result, calls


@each
def test_micro_batches_are_exact(family):
    model = built(family.name).train(family.name == "RwkvForCausalLM")  # which has no dropout, and no backward in eval
    batch = dict(family.batch)
    if batch["labels"].ndim == 2:  # tokens: rows of very different lengths
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 3:] = -100
    model.zero_grad()
    whole = family.loss(model, batch)
    whole.backward()
    expected = gradients(model)
    model.zero_grad()
    loss = ft.accumulate_gradients(lambda part: family.loss(model, part), batch, n=2)
    torch.testing.assert_close(loss, whole.detach())
    assert largest_difference(expected, gradients(model)) < 1e-5
    model.zero_grad()
    model.train()


def test_negative_control_dropout_is_on():
    random = [
        family.name
        for family in FAMILIES
        if loss_and_gradients(family, built(family.name), 3)["loss"]
        != loss_and_gradients(family, built(family.name), 4)["loss"]
    ]
    assert len(random) >= 20


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT's, for the Conv1D of GPT-2
@each
def test_adapters_are_seen_in_evaluation_and_merged(family):
    model = copy.deepcopy(built(family.name)).eval()
    if family.no_adapter:
        with pytest.raises(ValueError, match=family.no_adapter):
            ft.apply(model, [ft.LoRA(rank=2, targets="all-linear")])
        return
    torch.manual_seed(1)  # whichever tests ran before
    ft.apply(model, [ft.LoRA(rank=2, targets="all-linear")])
    with torch.no_grad():
        plain = family.loss(model, family.batch)
        factors = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
        for factor in factors:
            factor.normal_(std=2.0)
        adapted = family.loss(model, family.batch)
        ft.finetune.merge_adapters_(model)
        merged = family.loss(model, family.batch)
    assert factors
    assert abs(float(adapted - plain)) > 1e-5
    # Factors this large leave rounding errors, of which some kernels have more.
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in PREDICTED], ids=lambda family: family.name)
def test_the_peak_is_predicted_within_five_percent(family):
    model = built(family.name)
    batch = {key: value.repeat(8, *[1] * (value.ndim - 1)) for key, value in family.batch.items()}
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9)  # noqa: E731
    optimizer = sgd(model.parameters())
    for _ in range(2):
        with ft.profiling.PeakMemory("cpu", model, optimizer, batch) as meter:
            loss = family.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del loss
    optimizer.zero_grad()
    report = ft.predict_memory(model, batch, loss=family.loss, optimizer=sgd, device="cpu")
    assert abs(report.peak_bytes / meter.peak_bytes - 1) < 0.05
