"""LoRA on the experts of a layer, in floats and in 4 bits: equal to PEFT, with compatible files, and mergeable."""

import copy
import pickle

import peft
import pytest
import torch
from safetensors.torch import load_file

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import (
    add_adapter_,
    base_model,
    load_adapter_,
    merge_adapters_,
    quantize_base_,
    save_adapter,
    unload_adapters_,
    unmerge_adapters_,
)
from lightning_fasttrain.profiling import PeakMemory
from tests.finetune.test_quantized_stacks import EXPERTS, MODELS, batch, build, dequantized, step
from tests.support.nets import largest_difference

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
CONFIG = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=BOTH)
WEIGHTS = "adapter_model.safetensors"
each = pytest.mark.parametrize("kind", MODELS)
in_both = pytest.mark.parametrize("packed", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it


def base(kind="Mixtral", packed=True, **more):
    model = build(kind, **more)
    if packed:
        quantize_base_(model, skip="**.self_attn.*")
    return model


def given_numbers(model):
    """Set values that no initialization produces."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05, generator=generator)
    return model


def adapted(kind="Mixtral", packed=True, config=CONFIG, **more):
    model = base(kind, packed, **more)
    add_adapter_(model, config)
    return given_numbers(model)


def by_peft(kind, packed):
    """PEFT's model on the dequantised tensors."""
    plain = dequantized(kind, base(kind)) if packed else build(kind)
    return given_numbers(peft.get_peft_model(plain, copy.deepcopy(CONFIG)))


@each
@in_both
def test_loss_and_gradients_are_bitwise_pefts(kind, packed):
    loss, grads = step(adapted(kind, packed))
    expected, theirs = step(by_peft(kind, packed))
    assert loss == expected
    assert sum("experts" in name for name in grads) == 2 * EXPERTS  # A and B
    assert {f"base_model.model.{name}" for name in grads} == set(theirs)
    assert all(torch.equal(grad, theirs[f"base_model.model.{name}"]) for name, grad in grads.items())


@each
@in_both
def test_files_are_compatible_with_peft(kind, packed, tmp_path):
    ours, theirs = adapted(kind, packed), by_peft(kind, packed)
    expected = step(ours)[0]
    save_adapter(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (load_file(tmp_path / side / WEIGHTS) for side in ("ours", "theirs"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for side in ("ours", "theirs"):
        fresh = base(kind, packed)
        names = load_adapter_(fresh, tmp_path / side, check_base=not packed)
        assert {"q_proj", "gate_up_proj", "down_proj"} == {name.rpartition(".")[2] for name in names}
        assert step_free(fresh) == expected
        load_adapter_(fresh, tmp_path / side, check_base=not packed)  # replaces the existing adapter
    plain = dequantized(kind, base(kind)) if packed else build(kind)
    assert step_free(peft.PeftModel.from_pretrained(plain, tmp_path / "ours")) == expected


@torch.no_grad()
def step_free(model):
    return model(**batch()).loss.item()


def test_an_adapter_for_more_experts_or_other_tensors_is_refused(tmp_path):
    save_adapter(adapted(), tmp_path)
    with pytest.raises(ValueError, match=r"lora_A.weight' is \[8, 64\], expected \[4, 64\]"):
        load_adapter_(build(num_local_experts=2), tmp_path, check_base=False)
    with pytest.raises(
        ValueError, match="no tensors for 'model.layers.2.mlp.experts', 'model.layers.2.self_attn.q_proj'"
    ):
        load_adapter_(build(num_hidden_layers=3), tmp_path, check_base=False)


@pytest.mark.parametrize("into", [None, "dequantized", "requantized", "original"])
def test_merging_keeps_outputs_and_unmerging_restores_the_base(into):
    packed = into is not None
    model = adapted(packed=packed)
    expected, before = step_free(model), {name: value.clone() for name, value in model.state_dict().items()}
    report = merge_adapters_(model, into=into, original=build() if into == "original" else None)
    assert len(report.against_trained) == (EXPERTS if packed else 0)
    if into in (None, "dequantized"):
        assert step_free(model) == pytest.approx(expected, abs=1e-6)
    if into == "requantized":
        assert 0.05 < max(report.against_trained.values()) < 0.15  # as much as the first quantisation
    if into == "original":
        plain = by_peft("Mixtral", False).merge_and_unload()
        assert step_free(model) == step_free(plain)
    unmerge_adapters_(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert step_free(model) == expected


@in_both
def test_unloading_or_disabling_gives_the_plain_model(packed):
    model = adapted(packed=packed)
    expected, plain = step_free(model), step_free(base(packed=packed))
    with base_model(model):
        assert step_free(model) == plain
    without = unload_adapters_(copy.deepcopy(model), merge=False)
    assert step_free(without) == plain
    assert without.state_dict().keys() == base(packed=packed).state_dict().keys()
    merged = unload_adapters_(model, into="dequantized" if packed else None)
    assert step_free(merged) == pytest.approx(expected, abs=1e-6)
    assert merged.state_dict().keys() == build().state_dict().keys()


def test_several_adapters_on_the_same_experts_are_distinguished():
    model = adapted()
    one = step_free(model)
    add_adapter_(model, CONFIG, name="second")
    ft.finetune.use_adapter_(model, "second")
    given_numbers(model)
    assert step_free(model) == one  # the same values under another name
    ft.finetune.use_adapter_(model, ["default", "second"])
    assert step_free(model) != one


def test_copies_and_pickles_are_independent():
    model = adapted()
    expected = step_free(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert step_free(other) == expected
        given_numbers(other.lm_head.requires_grad_(True))
    assert step_free(model) == expected


@pytest.mark.parametrize("technique", [ft.ActivationCheckpointing, lambda: ft.ActivationOffload(min_mib=0)])
def test_other_techniques_do_not_change_gradients(technique):
    model = adapted()
    expected = step(model)
    with ft.apply(model, [technique()]):
        found = step(model)
    assert found[0] == expected[0]
    assert largest_difference(expected[1], found[1]) == 0


def test_backward_saves_no_dequantised_experts():
    model = adapted(hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_local_experts=8)
    floats = 4 * 4 * 8 * 3 * 128 * 512
    given = batch(rows=1)
    with PeakMemory(torch.device("cpu"), model, given) as memory:
        step(model, given)
    assert memory.peak_bytes < 0.75 * floats


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_initialization_that_decomposes_a_layer_is_refused(start):
    config = peft.LoraConfig(r=2, init_lora_weights=start, target_modules=[], target_parameters=BOTH)
    with pytest.raises(TypeError, match=f"'{start}' on the tensor 'model.layers.0.mlp.experts.gate_up_proj'"):
        add_adapter_(build(), config)


def test_missing_tensor_is_named():
    with pytest.raises(ValueError, match="'experts.gate_proj' matches nothing in .*Similar names: .*gate_up_proj"):
        add_adapter_(build(), peft.LoraConfig(target_parameters=["experts.gate_proj"]))
