"""PEFT's initializations other than zero: applied with its own values, or refused with what they need."""

import copy
import importlib.util

import peft
import pytest
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import add_adapter_, load_adapter_, quantize_base_, save_adapter
from tests.finetune.test_side_by_side import MODELS, TEXT, build, step
from tests.support.nets import ShallowLM

corda = importlib.import_module("peft.tuners.lora.corda")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:lora with eva initialization used with low_cpu_mem_usage"),
    pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'corda' but"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # PEFT's, for LoRA-GA
]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def batches(rows=4):
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(0, 64, (rows, 12), generator=generator) for _ in range(6)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in drawn]


def factors(model):
    return {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if "lora_" in n}


def eva():
    return peft.LoraConfig(r=4, init_lora_weights="eva", eva_config=peft.EvaConfig(), target_modules=TARGETS)


def test_eva_equals_pefts_with_redistributed_ranks():
    model, theirs = build("Llama"), peft.get_peft_model(build("Llama"), eva())
    expected = step(model, "Llama")[0]
    peft.initialize_lora_eva_weights(theirs, batches(), show_progress_bar=False)
    add_adapter_(model, eva(), batches=batches())
    ours, theirs = factors(model), factors(theirs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len({len(p) for name, p in ours.items() if "lora_A" in name}) > 1
    assert step(model, "Llama")[0] == expected
    assert all(parameter.requires_grad for parameter in ours.values())


def test_eva_adapter_is_idempotent_and_saves(tmp_path):
    model = build("Llama")
    technique = ft.finetune.Adapter(eva(), batches=batches())
    ft.apply(model, [technique])
    before = copy.deepcopy(model.state_dict())
    technique.apply(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fresh = build("Llama")
    load_adapter_(fresh, save_adapter(model, tmp_path))
    assert all(torch.equal(value, factors(model)[name]) for name, value in factors(fresh).items())


def test_eva_works_in_a_custom_network():
    model = ShallowLM()
    ids = [torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    add_adapter_(model, eva(), "up", batches=ids)
    a = model.blocks[0].up.lora_A["default"].weight
    torch.testing.assert_close(a @ a.T, torch.eye(len(a)), rtol=0, atol=1e-4)  # directions


def test_corda_equals_pefts():
    def config():
        settings = peft.tuners.lora.config.CordaConfig(corda_method="kpm")
        return peft.LoraConfig(r=4, init_lora_weights="corda", corda_config=settings, target_modules=TARGETS)

    model, theirs, theirs_config = build("Llama"), build("Llama"), config()
    expected = step(model, "Llama")[0]
    joined = {key: torch.cat([batch[key] for batch in batches(1)]) for key in batches(1)[0]}
    corda.preprocess_corda(theirs, theirs_config, run_model=lambda: [theirs(**batch) for batch in batches(1)])
    add_adapter_(model, config(), batches=[joined])
    theirs = peft.get_peft_model(theirs, theirs_config)
    assert all(torch.equal(value, factors(theirs)[name]) for name, value in factors(model).items())
    assert step(model, "Llama")[0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="was initialized with init_lora_weights='corda'"):
        save_adapter(model, "nowhere")


@pytest.mark.parametrize("start", ["eva", "corda", "lora_ga", "loftq"])
def test_missing_requirements_are_reported_before_the_model_changes(start):
    config = peft.LoraConfig()
    config.init_lora_weights = start  # set afterwards, since PEFT requires scipy for LoftQ in the constructor
    need = {"lora_ga": "Call peft.tuners.lora.loraga.preprocess_loraga", "loftq": "PEFT computes it on a GPU"}
    model = build("Llama")
    before = list(model.modules())
    with pytest.raises(ValueError, match=need.get(start, "Pass batches= that the model")):
        add_adapter_(model, config, "q_proj")
    assert list(model.modules()) == before
    quantize_base_(model)
    if start != "eva":
        with pytest.raises(TypeError, match="which is quantised: this initialization needs the values of the weight"):
            add_adapter_(model, config, "q_proj")


def test_lora_ga_uses_the_gradients_computed_by_peft():
    config = peft.LoraConfig(
        r=4, init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig(), target_modules=TARGETS
    )
    model, theirs = build("Llama"), build("Llama")
    for one in (model, theirs):
        preprocess = importlib.import_module("peft.tuners.lora.loraga").preprocess_loraga
        preprocess(one, config, lambda one=one: one(**MODELS["Llama"][2]).loss.backward())
    torch.manual_seed(0)
    add_adapter_(model, config)
    torch.manual_seed(0)
    theirs = factors(peft.get_peft_model(theirs, config))
    assert all(torch.equal(value, theirs[name]) for name, value in factors(model).items())


@pytest.mark.parametrize("start", ["eva", "corda"])
def test_prediction_reads_no_data(start):
    config = peft.LoraConfig(r=4)
    config.init_lora_weights, config.eva_config = start, peft.EvaConfig()
    techniques = [
        ft.finetune.Adapter(config, TARGETS, batches=batches()),
        ft.finetune.Adapter(peft.LoraConfig(r=4), TARGETS),
    ]
    found = []
    for technique in techniques:
        how = {"loss": lambda model, batch: model(**batch).loss, "optimizer": torch.optim.AdamW, "device": "cpu"}
        found.append(ft.predict_memory(build("Llama"), TEXT, techniques=[technique], **how))
    assert found[0].peak_bytes == found[1].peak_bytes


def test_batches_for_a_data_free_initialization_are_refused():
    with pytest.raises(ValueError, match="this initialization uses no data"):
        add_adapter_(build("Llama"), peft.LoraConfig(), "q_proj", batches=[TEXT])
