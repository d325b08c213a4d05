"""Adapters are added where expected, nothing else trains, and the base model can be restored."""

import copy
import warnings

import lightning as L
import pytest
import torch
import transformers
from torch import nn

import lightning_fasttrain as ft
from tests.finetune.test_targets import bert, llama
from tests.support.nets import TinyLM, as_loader, fit, lm_batches, trainer, trains, weights

peft = pytest.importorskip("peft")
BATCH = lm_batches(1)[0]
IDS = BATCH["input_ids"]


def awake(model, name="default"):
    """Make an adapter change the output: its B is initialized to zero."""
    generator = torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if f"lora_B.{name}" in key:
            parameter.data.normal_(generator=generator)
    return model


@pytest.mark.parametrize("variant", ["lora", "rslora"])
@pytest.mark.parametrize("make", [TinyLM, llama, bert])
def test_new_adapter_leaves_the_output_bitwise_unchanged(make, variant):
    model = make().eval()
    ids = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(1))

    def output():
        result = model(ids)
        return result if torch.is_tensor(result) else result.logits

    before = output()
    ft.apply(model, [ft.LoRA(rank=2, variant=variant)])
    assert torch.equal(output(), before)


def test_output_equals_the_formula_of_the_paper():
    model = TinyLM()
    layer = model.blocks[0].up
    weight, bias, x = layer.weight.clone(), layer.bias.clone(), torch.randn(4, 8)
    ft.apply(model, [ft.LoRA(rank=2, alpha=6, targets="blocks.0.up")])
    adapted = awake(model).blocks[0].up
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    assert a.shape == (2, 8)
    assert b.shape == (16, 2)
    torch.testing.assert_close(adapted(x), x @ (weight + 6 / 2 * b @ a).T + bias)


def test_only_the_adapter_and_named_modules_train():
    model = TinyLM()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    names = ft.finetune.add_adapter_(model, peft.LoraConfig(r=2), "blocks.0.up", train=["head"])
    assert names == ["blocks.0.up"]
    stem = "blocks.0.up.lora_"
    assert trains(model) == [
        f"{stem}A.default.weight",
        f"{stem}B.default.weight",
        "head.modules_to_save.default.weight",
    ]


def test_modules_outside_the_adapted_model_are_frozen_too():
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.other, self.model = nn.Linear(4, 4), llama()

    module = Module()
    names = ft.finetune.add_adapter_(module, peft.LoraConfig(r=2), ["q_proj"])
    assert names == [f"model.model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert all("lora_" in name for name in trains(module))
    assert list(module.model.peft_config) == ["default"]  # adapter files name layers as seen from here
    assert module.model.peft_config["default"].target_modules == {"q_proj"}


def test_log_line_reports_trained_parameters_and_skipped_heads(caplog):
    with caplog.at_level("INFO", logger="lightning_fasttrain"):
        ft.apply(TinyLM(), [ft.LoRA(rank=2)])
    trained, total = 3 * 2 * (2 * 8 + 2 * 16), sum(p.numel() for p in TinyLM().parameters())
    assert f"trains {trained:,} of {trained + total:,} parameters" in caplog.text
    assert "6 layers (up (Linear) ×3, down (Linear) ×3); heads without adapter: head" in caplog.text


def test_frozen_norms_keep_statistics_and_adapter_dropout_is_active():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    ft.apply(net, [ft.LoRA(rank=2, targets="0", dropout=0.5)])
    assert net[0].lora_dropout["default"].training  # although the model is in eval mode, as pretrained ones are
    before = weights(net[1])
    net.train()(torch.randn(8, 4))
    assert all(torch.equal(value, before[name]) for name, value in net[1].state_dict().items())


def test_adding_twice_equals_once_and_another_config_is_refused():
    model = TinyLM()
    ft.apply(model, [ft.LoRA(rank=2)])
    modules = [id(module) for module in model.modules()]
    ft.apply(model, [ft.LoRA(rank=2)])
    assert [id(module) for module in model.modules()] == modules
    with pytest.raises(ValueError, match="an adapter of this name exists, with another r"):
        ft.apply(model, [ft.LoRA(rank=3)])
    with pytest.raises(ValueError, match="IA3 beside LORA"):
        ft.apply(model, [ft.finetune.IA3(name="other")])


def test_several_adapters_are_selected_by_name():
    model = TinyLM()
    base = model(BATCH["input_ids"])
    for name in ("one", "two"):
        ft.apply(model, [ft.LoRA(rank=2, targets="up", name=name)])
        awake(model, name)
    assert ft.finetune.adapter_names(model) == ["one", "two"]
    outputs = []
    for names in ("one", "two", ["one", "two"]):
        ft.finetune.use_adapter_(model, names)
        assert all(any(f".{n}." in t for n in ([names] if isinstance(names, str) else names)) for t in trains(model))
        outputs.append(model(BATCH["input_ids"]))
    assert not any(torch.allclose(output, base) for output in outputs)
    assert not torch.allclose(outputs[0], outputs[2])
    with pytest.raises(ValueError, match="adapter .three.: the model has no adapter.*: one, two"):
        ft.finetune.use_adapter_(model, "three")


def test_removing_one_adapter_leaves_the_others_unchanged():
    model = TinyLM()
    outputs = {}
    for name in ("one", "two"):
        ft.apply(model, [ft.LoRA(rank=2, targets="up", name=name)])
        awake(model, name)
        ft.finetune.use_adapter_(model, name)
        outputs[name] = model(IDS)
    ft.finetune.remove_adapter_(model, "two")
    assert ft.finetune.adapter_names(model) == ["one"]
    assert torch.equal(model(IDS), outputs["one"])  # the active one was removed, so the first that is left is active
    assert all(".one." in name for name in trains(model))
    assert not any(".two" in name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="it is the only adapter"):
        ft.finetune.remove_adapter_(model, "one")


def test_base_model_disables_the_adapter_inside_the_with_block():
    model = TinyLM()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    base = model(BATCH["input_ids"])
    ft.finetune.add_adapter_(model, peft.LoraConfig(r=2), "up", train=["head"])
    model.head.modules_to_save["default"].weight.data.add_(1)
    adapted, training = awake(model)(BATCH["input_ids"]), trains(model)
    with pytest.raises(RuntimeError), ft.finetune.base_model(model) as reference:
        assert torch.equal(reference(BATCH["input_ids"]), base)
        raise RuntimeError
    assert torch.equal(model(BATCH["input_ids"]), adapted)
    assert trains(model) == training
    ft.finetune.enable_adapters_(model, False)
    assert torch.equal(model(BATCH["input_ids"]), base)
    ft.finetune.enable_adapters_(model)
    assert torch.equal(model(BATCH["input_ids"]), adapted)
    assert trains(model) == training


def test_a_copy_is_independent():
    model = awake(ft.apply(TinyLM(), []) and TinyLM())
    ft.apply(model, [ft.LoRA(rank=2)])
    other = copy.deepcopy(model)
    awake(other)
    assert not torch.equal(other(BATCH["input_ids"]), model(BATCH["input_ids"]))


def test_model_without_an_adapter_is_an_error():
    with pytest.raises(ValueError, match="TinyLM has no adapter"), ft.finetune.base_model(TinyLM()):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": True}, "rank=True"),
        ({"alpha": 0}, "alpha=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"variant": "lora+"}, "variant='lora\\+'"),
        ({"checkpoint": "whole"}, "checkpoint='whole'"),
    ],
)
def test_bad_settings_are_refused_when_they_are_given(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ft.LoRA(**settings)


def test_bad_targets_are_refused_and_nothing_is_changed():
    attention = nn.Sequential(nn.MultiheadAttention(4, 1), nn.Linear(4, 4))
    for model, kwargs, error, message in [
        (TinyLM(), {"rank": 9, "targets": "up"}, ValueError, "rank=9 for 'blocks.0.up': the layer is 8 → 16"),
        (TinyLM(), {"rank": 2, "targets": "head"}, ValueError, "it shares its weight with 'embed'"),
        (TinyLM(), {"rank": 2, "targets": "norm"}, TypeError, "PEFT reports"),
        (TinyLM(), {"rank": 2, "name": "a.b"}, ValueError, "name='a.b'"),
        (TinyLM(), {"rank": 2, "name": "blocks"}, ValueError, "a module of the model has this name"),
        (TinyLM(), {"rank": 2, "targets": "up", "train": ["0.up"]}, ValueError, "it is both a target and in train="),
        (attention, {"rank": 2, "targets": "out_proj"}, TypeError, "Target '0'"),
    ]:
        before = trains(model), [type(m) for m in model.modules()], list(vars(model))
        with pytest.raises(error, match=message):
            ft.apply(model, [ft.LoRA(**kwargs)])
        assert before == (trains(model), [type(m) for m in model.modules()], list(vars(model))), message


def test_other_objects_than_configurations_are_refused():
    with pytest.raises(TypeError, match=r"Use apply\(model, \[LoRA"):
        ft.finetune.add_adapter_(TinyLM(), ft.LoRA(2))
    with pytest.raises(TypeError, match="prepends virtual tokens to the input"):
        ft.finetune.add_adapter_(TinyLM(), peft.PromptTuningConfig(num_virtual_tokens=3))
    for config in (
        peft.XLoraConfig(hidden_size=8, adapters={}),
        peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1),
    ):
        with pytest.raises(TypeError, match="PEFT adds this kind to a whole Hugging Face model"):
            ft.finetune.add_adapter_(TinyLM(), config)
    with pytest.raises(TypeError, match="config=dict"):
        ft.finetune.add_adapter_(TinyLM(), {"r": 2})


def test_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-fasttrain\[finetune\]"):
        ft.LoRA()


@pytest.mark.parametrize("make", [llama, TinyLM])
def test_ia3_targets_the_papers_layers_by_default(make):
    model = make()
    ft.apply(model, [ft.finetune.IA3()])
    config = model.peft_config["default"]
    if make is llama:
        assert config.target_modules == {"k_proj", "v_proj", "down_proj"}
        assert model.model.layers[0].mlp.down_proj.is_feedforward
        assert not model.model.layers[0].self_attn.k_proj.is_feedforward
    else:
        assert config.target_modules == {"up", "down"}
    assert all("ia3_l" in name for name in trains(model))


def test_ia3_on_mixtral_scales_its_attention_and_its_file_is_loaded_again(tmp_path):
    def mixtral():
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=32, **sizes, **heads))

    model, ids = mixtral().eval(), torch.arange(8)[None]
    ft.apply(model, [ft.finetune.IA3()])
    assert model.peft_config["default"].target_modules == {"k_proj", "v_proj"}  # its experts are parameters
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3_l" in name:
                parameter.add_(0.1)
        expected = model(ids).logits
        ft.finetune.save_adapter(model, tmp_path)
        loaded = mixtral().eval()
        ft.finetune.load_adapter_(loaded, tmp_path)
        assert torch.equal(loaded(ids).logits, expected)


def test_pissa_starts_from_the_largest_singular_vectors():
    model = TinyLM()
    weight = model.blocks[0].up.weight.detach().clone()
    ft.apply(model, [ft.LoRA(rank=2, alpha=2, targets="0.up", variant="pissa")])
    layer = model.blocks[0].up
    u, s, v = torch.linalg.svd(weight)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(product, u[:, :2] * s[:2] @ v[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.base_layer.weight + product, weight, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_are_not_in_the_optimizer_and_do_not_change():
    model, before = TinyLM(), weights(TinyLM())
    t = trainer([ft.LoRA(rank=2)], max_epochs=2)
    t.fit(model, as_loader(lm_batches(3)))
    held = {id(p) for group in t.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if "lora_" in name}
    after = {name.replace(".base_layer", ""): value for name, value in weights(model).items() if "lora_" not in name}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(float(p.detach().abs().max()) > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_optimizer_with_names_keeps_those_of_trained_parameters():
    class Named(TinyLM):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.named_parameters(), lr=0.01)

    model = Named()
    t = trainer([ft.LoRA(rank=2)])
    t.fit(model, as_loader(lm_batches(1)))
    (group,) = t.optimizers[0].param_groups
    assert group["param_names"] == trains(model)
    assert [id(p) for p in group["params"]] == [id(model.get_parameter(name)) for name in group["param_names"]]


def test_lazy_and_refitted_models_keep_the_same_adapter():
    from tests.support.nets import LazyLM

    model, technique = LazyLM(), ft.LoRA(rank=2)
    trainer([technique]).fit(model, as_loader(lm_batches(3)))
    once = weights(model)
    trainer([technique]).fit(model, as_loader(lm_batches(3)))
    assert list(weights(model)) == list(once)
    assert any(not torch.equal(once[name], value) for name, value in weights(model).items())


def mamba():
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 50, "time_step_rank": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**config))


@pytest.mark.parametrize(
    "technique", [lambda: ft.LoRA(rank=2), lambda: ft.finetune.IA3("all-linear"), lambda: ft.QLoRA(rank=2)]
)
def test_all_linear_on_mamba_is_the_layers_that_are_called(technique, caplog):
    model = mamba()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*of the bytes of Mamba.* stay in full precision")
        ft.apply(model, [technique()])
    left = ", ".join(f"backbone.layers.0.mixer.{name}" for name in ("x_proj", "dt_proj", "out_proj"))
    assert f"since their weights are read without calling them: {left} and 3 more" in caplog.text
    model(IDS, labels=IDS).loss.backward()
    trained = {name: p.grad is not None for name, p in model.named_parameters() if p.requires_grad}
    assert all(trained.values())
    assert all(".in_proj." in name for name in trained)


def test_unsupported_mamba_layers_are_refused_with_a_clear_message():
    with pytest.raises(TypeError, match=r"LORA on .*out_proj.*PEFT reports.*Leave these layers out"):
        ft.apply(mamba(), [ft.LoRA(rank=2, targets="out_proj")])


class PassedBy(TinyLM):
    """A model that uses a layer's weight without calling the layer."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.nn.functional.linear(block.up(x), block.down.weight, block.down.bias)
        return self.head(x)


def test_unused_adapters_are_named_after_the_first_step():
    for targets in ("all-linear", "up"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(PassedBy(), lm_batches(2), [ft.LoRA(rank=2, targets=targets)])
        said = [str(one.message) for one in caught if "got no gradient" in str(one.message)]
        assert len(said) == (targets == "all-linear")
        assert all("blocks.0.down.lora_A.default.weight" in one for one in said)
