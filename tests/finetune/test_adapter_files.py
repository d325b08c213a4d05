"""Adapters are saved and loaded bitwise, by PEFT and by this package; incomplete files are never visible."""

import copy
import importlib.util
import json
import os
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fasttrain import FastTrainWarning, LoRA, apply
from lightning_fasttrain.finetune import (
    Adapter,
    add_adapter_,
    add_prompt_,
    load_adapter_,
    merge_adapters_,
    save_adapter,
    use_adapter_,
)
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters
from lightning_fasttrain.finetune.prompt_tuning import refuse_renamed_cache
from tests.finetune.test_targets import TINY, bert, llama
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer, weights

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # Shira's layers are sparse
]
IDS = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(1))
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def output(model):
    with torch.no_grad():
        result = model.eval()(IDS)
    return result if torch.is_tensor(result) else result.logits


def trained(model, seed=5):
    """Give every adapter parameter new values, as training does."""
    generator, own = torch.Generator().manual_seed(seed), adapter_parameters(model)
    for name, parameter in model.named_parameters():
        if name in own and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


class Holder(L.LightningModule):
    """A LightningModule around a Hugging Face model, with a layer of its own."""

    def __init__(self, model):
        super().__init__()
        self.other, self.model = nn.Linear(2, 2), model

    def forward(self, ids):
        return self.model(ids)


MODELS = {
    "llama": (llama, ["q_proj", "down_proj"], []),
    "bert": (bert, ["query", "intermediate.dense"], ["classifier"]),
    "plain": (TinyLM, ["up", "0.down"], ["blocks.1.norm"]),
}
KINDS = {
    "lora": peft.LoraConfig(r=2, lora_alpha=3),
    "rslora": peft.LoraConfig(r=2, use_rslora=True),
    "dora": peft.LoraConfig(r=2, use_dora=True),
    "pissa": peft.LoraConfig(r=2, init_lora_weights="pissa"),
    "olora": peft.LoraConfig(r=2, init_lora_weights="olora"),
    "bias": peft.LoraConfig(r=2, bias="all"),
    "ia3": peft.IA3Config(feedforward_modules=[]),
    "lokr": peft.LoKrConfig(r=2),
    "oft": peft.OFTConfig(r=2, oft_block_size=0),
    "shira": peft.ShiraConfig(r=2),  # it selects weights at random, and the file stores the selection
}
if importlib.util.find_spec("sklearn"):  # PEFT needs it for this kind
    KINDS["adamss"] = peft.AdamssConfig(r=2, num_subspaces=2)  # the shapes depend on the weights
each_model = pytest.mark.parametrize("which", MODELS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def adapted(which, kind="lora", name="default"):
    """Return a base, and a copy of it with a trained adapter."""
    make, targets, train = MODELS[which]
    base = make()
    model = copy.deepcopy(base)
    config = copy.deepcopy(KINDS[kind])
    if kind == "ia3":
        config.feedforward_modules = targets[1:]
    add_adapter_(model, config, targets, train=train, name=name)
    return base, trained(model)


def by_peft(base, model, folder, kind="lora"):
    """Save the same adapter with PEFT."""
    config = copy.deepcopy(model.peft_config["default"])
    wrapped = peft.get_peft_model(copy.deepcopy(base), config)
    own = adapter_parameters(model)
    state = {
        f"base_model.model.{key}": value for key, value in model.state_dict().items() if key in own or "bias" in key
    }
    assert not wrapped.load_state_dict(state, strict=False).unexpected_keys
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return wrapped


@each_model
@pytest.mark.parametrize("kind", ["lora", "dora", "pissa", "ia3", "bias"])
def test_names_tensors_and_settings_equal_pefts_files(which, kind, tmp_path):
    base, model = adapted(which, kind)
    folder = save_adapter(model, tmp_path / "ours")
    by_peft(base, model, tmp_path / "theirs", kind)
    ours, theirs = (safetensors.load_file(tmp_path / one / WEIGHTS) for one in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    ours, theirs = (json.loads((tmp_path / one / CONFIG).read_text()) for one in ("ours", "theirs"))
    for one in (ours, theirs):
        one["target_modules"] = sorted(one["target_modules"])
    assert ours == theirs
    assert sorted(os.listdir(folder)) == [CONFIG, WEIGHTS]


@each_model
@each_kind
def test_loaded_adapter_gives_bitwise_equal_outputs(which, kind, tmp_path):
    base, model = adapted(which, kind)
    expected = output(model)
    assert not torch.allclose(expected, output(base))
    folder = save_adapter(model, tmp_path)
    ours = copy.deepcopy(base)
    load_adapter_(ours, folder)
    assert torch.equal(output(ours), expected)
    assert torch.equal(output(peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)), expected)


@each_model
@each_kind
def test_adapters_saved_by_peft_load(which, kind, tmp_path):
    base, model = adapted(which, kind)
    expected = output(by_peft(base, model, tmp_path, kind))
    names = load_adapter_(base, tmp_path)
    assert torch.equal(output(base), expected)
    assert len(names) == {"llama": 4, "bert": 4, "plain": 4}[which]
    assert names[0] == {"llama": "model.layers.0.self_attn.q_proj", "plain": "blocks.0.up"}.get(which, names[0])


def test_saving_a_wrapper_module_gives_the_file_of_the_inner_model(tmp_path):
    base = bert()
    module = Holder(copy.deepcopy(base))
    apply(module, [LoRA(rank=2, targets=["query", "dense"], train=["classifier"])])
    trained(module)
    folder = save_adapter(module, tmp_path)
    for other in (peft.PeftModel.from_pretrained(copy.deepcopy(base), folder), copy.deepcopy(base), Holder(base)):
        if not isinstance(other, peft.PeftModel):
            load_adapter_(other, folder)
        assert torch.equal(output(other), output(module))


def test_tensor_shapes_determine_which_layers_ia3_scales_at_their_input(tmp_path):
    base = llama()
    for expression in (r".*\.down_proj", "nothing"):
        config = peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
        wrapped = trained(peft.get_peft_model(copy.deepcopy(base), config))
        wrapped.save_pretrained(tmp_path)
        settings = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps({**settings, "feedforward_modules": expression}))
        load_adapter_(other := copy.deepcopy(base), tmp_path)
        assert torch.equal(output(other), output(wrapped))
        assert other.peft_config["default"].feedforward_modules == {"down_proj"}


def test_adapters_on_embeddings_and_regular_expressions_load(tmp_path):
    base = llama()
    model = copy.deepcopy(base)
    config = peft.LoraConfig(r=2, rank_pattern={"0.self_attn.q_proj": 3}, alpha_pattern={"embed_tokens": 5})
    add_adapter_(model, config, ["embed_tokens", "0.self_attn.q_proj", "1.mlp.up_proj"])
    folder = save_adapter(trained(model), tmp_path / "ours")
    assert not [key for key in safetensors.load_file(folder / WEIGHTS) if "base_layer" in key]
    other = copy.deepcopy(base)
    load_adapter_(other, folder)
    assert torch.equal(output(other), output(model))
    assert torch.equal(output(peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)), output(model))


def test_embeddings_in_pefts_file_must_equal_those_of_the_base(tmp_path):
    base = llama()
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
    trained(wrapped).save_pretrained(tmp_path, save_embedding_layers=True)
    assert any("base_layer" in key for key in safetensors.load_file(tmp_path / WEIGHTS))
    other = copy.deepcopy(base)
    load_adapter_(other, tmp_path)
    assert torch.equal(output(other), output(wrapped))
    base.model.embed_tokens.weight.data[3, 3] += 1
    with pytest.raises(ValueError, match="weight of its base: 'model.embed_tokens.base_layer.weight' differs"):
        load_adapter_(base, tmp_path)


def test_several_adapters_are_saved_in_separate_folders(tmp_path):
    base, model = adapted("llama", name="one")
    add_adapter_(model, KINDS["dora"], ["v_proj"], name="two")
    trained(model, seed=6)
    with pytest.raises(ValueError, match="several adapters: 'one', 'two'. Select one, for example name='one'"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="name='three': there is no such adapter. Existing adapters: 'one', 'two'"):
        save_adapter(model, tmp_path, name="three")
    other = copy.deepcopy(base)
    for name, called in (("one", "first"), ("two", "second")):
        load_adapter_(other, save_adapter(model, tmp_path / name, name=name), name=called)
        use_adapter_(model, name)
        assert torch.equal(output(other), output(model))  # the loaded adapter is active
    use_adapter_(other, "first")
    use_adapter_(model, "one")
    assert torch.equal(output(other), output(model))


def test_adapters_of_two_models_in_one_module_are_distinguished(tmp_path):
    actor, critic = llama(), llama()
    both = nn.ModuleDict({"actor": copy.deepcopy(actor), "critic": critic})
    add_adapter_(both["actor"], KINDS["lora"], ["q_proj"])
    with pytest.warns(FastTrainWarning, match="'critic.model.embed_tokens.weight', .* train too"):
        folder = save_adapter(trained(both), tmp_path)  # of the model with an adapter
    assert torch.equal(output(both["actor"]), output(peft.PeftModel.from_pretrained(actor, folder)))
    add_adapter_(both["critic"], KINDS["lora"], ["q_proj"])
    with pytest.raises(
        ValueError, match=r"several adapters: 'default' in actor, 'default' in critic. Name the module: save_adapter"
    ):
        save_adapter(both, tmp_path)
    save_adapter(both["critic"], tmp_path)
    with pytest.raises(ValueError, match=r"several places for the adapter: 'actor', 'critic' have its layers"):
        load_adapter_(nn.ModuleDict({"actor": llama(), "critic": llama()}), folder, check_base=False)


def test_loaded_adapter_is_frozen_unless_trainable(tmp_path):
    base = bert()
    model = copy.deepcopy(base)
    add_adapter_(model, peft.LoraConfig(r=2, lora_dropout=0.5), "query", train=["classifier"])
    trains = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    folder = save_adapter(trained(model), tmp_path)
    frozen, going_on = copy.deepcopy(base), copy.deepcopy(base)
    load_adapter_(frozen, folder)
    load_adapter_(going_on, folder, trainable=True)
    assert not [name for name, parameter in frozen.named_parameters() if parameter.requires_grad]
    assert [name for name, parameter in going_on.named_parameters() if parameter.requires_grad] == trains
    for other, on in ((frozen, False), (going_on, True)):
        assert other.bert.encoder.layer[0].attention.self.query.lora_dropout["default"].training is on
    load_adapter_(going_on, folder)  # the adapter exists by now
    assert not [name for name, parameter in going_on.named_parameters() if parameter.requires_grad]


def test_loading_an_existing_name_replaces_its_weights(tmp_path):
    base, model = adapted("plain")
    folder, expected = save_adapter(model, tmp_path), output(model)
    add_adapter_(base, KINDS["lora"], ["up", "0.down"], train=["blocks.1.norm"])
    modules = list(base.modules())
    load_adapter_(base, folder)
    assert torch.equal(output(base), expected)
    assert list(base.modules()) == modules
    add_adapter_(other := TinyLM(), peft.LoraConfig(r=2, lora_alpha=4), ["up", "0.down"], train=["blocks.1.norm"])
    before = weights(other)
    with pytest.raises(ValueError, match="an adapter of this name exists, with another lora_alpha"):
        load_adapter_(other, folder)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_merged_adapter_saves_the_same_file(tmp_path):
    base, model = adapted("llama")
    expected = output(model)
    before = safetensors.load_file(save_adapter(model, tmp_path / "before") / WEIGHTS)
    merge_adapters_(model)
    folder = save_adapter(model, tmp_path / "merged")
    after = safetensors.load_file(folder / WEIGHTS)
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    load_adapter_(base, folder)
    assert torch.equal(output(base), expected)


def test_adapter_of_a_bfloat16_base_is_saved_in_float32(tmp_path):
    base = llama()
    model = copy.deepcopy(base).bfloat16()
    add_adapter_(model, KINDS["lora"], ["q_proj"])
    trained(model)
    folder = save_adapter(model, tmp_path)
    assert {value.dtype for value in safetensors.load_file(folder / WEIGHTS).values()} == {torch.float32}
    other = copy.deepcopy(base).bfloat16()
    load_adapter_(other, folder)
    assert torch.equal(output(other), output(model))
    load_adapter_(base, folder)
    torch.testing.assert_close(output(base), output(model).float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("first", ["quantised", "plain"])
def test_adapters_load_across_quantised_and_plain_bases(first, tmp_path):
    pytest.importorskip("bitsandbytes")
    from lightning_fasttrain.finetune import quantize_base_

    plain = llama()
    quantised = copy.deepcopy(plain)
    quantize_base_(quantised, "nf4")
    kept = {"quantised": copy.deepcopy(quantised), "plain": copy.deepcopy(plain)}
    models = {"quantised": quantised, "plain": plain}
    model = models.pop(first)
    add_adapter_(model, KINDS["lora"], ["q_proj", "up_proj"])
    folder = save_adapter(trained(model), tmp_path)
    for other in (kept[first], *models.values()):
        load_adapter_(other, folder)
        own, theirs = (
            {key: value for key, value in one.state_dict().items() if "lora_" in key} for one in (model, other)
        )
        assert all(torch.equal(own[key], theirs[key]) for key in own)
    assert torch.equal(output(kept[first]), output(model))
    torch.testing.assert_close(output(next(iter(models.values()))), output(model), rtol=0.5, atol=0.5)


def test_loading_draws_no_random_numbers(tmp_path):
    base, model = adapted("plain")
    folder, state = save_adapter(model, tmp_path), torch.get_rng_state()
    load_adapter_(base, folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copy_of_a_loaded_model_is_independent(tmp_path):
    base, model = adapted("llama")
    load_adapter_(base, save_adapter(model, tmp_path))
    other = copy.deepcopy(base)
    assert torch.equal(output(other), output(base))
    trained(other)
    assert not torch.equal(output(other), output(base))
    assert torch.equal(output(base), output(model))


def test_trained_parameters_outside_the_adapter_are_warned_about(tmp_path):
    _, model = adapted("plain")
    model.blocks[0].norm.requires_grad_(True)
    with pytest.warns(FastTrainWarning, match="'blocks.0.norm.weight', 'blocks.0.norm.bias' train too, but"):
        save_adapter(model, tmp_path)


def test_training_continues_from_a_loaded_adapter(tmp_path):
    base, model = adapted("plain")
    folder = save_adapter(model, tmp_path / "adapter")
    ends = []
    for module in (model, base):
        if module is base:
            load_adapter_(base, folder, trainable=True)
        torch.manual_seed(3)
        technique = Adapter(KINDS["lora"], ["up", "0.down"], train=["blocks.1.norm"])
        trainer([technique], max_epochs=2).fit(module, as_loader(lm_batches(3)))
        ends.append(weights(module))
    assert set(ends[0]) == set(ends[1])
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert not torch.equal(ends[0]["blocks.1.norm.modules_to_save.default.weight"], torch.ones(8))


PROMPTS = {
    "tokens": peft.PromptTuningConfig(num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3),
    "projected": peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=4),
}


@pytest.mark.parametrize(
    ("which", "kind"), [("llama", "tokens"), ("llama", "prefix"), ("llama", "projected"), ("bert", "tokens")]
)
def test_virtual_tokens_survive_saving_and_loading(which, kind, tmp_path):
    if kind != "tokens":
        try:
            refuse_renamed_cache("a prefix")
        except RuntimeError as error:
            pytest.skip(str(error))
    base = MODELS[which][0]()
    model = Holder(copy.deepcopy(base))
    add_prompt_(model, PROMPTS[kind])
    folder, expected = save_adapter(trained(model), tmp_path), output(model)
    assert not torch.equal(expected, output(base))
    close = 1e-6 if kind == "projected" else 0  # products of one row and of several round differently
    other = Holder(copy.deepcopy(base))
    assert load_adapter_(other, folder) == ["model"]
    torch.testing.assert_close(output(other), expected, rtol=0, atol=close)
    assert not [name for name, parameter in other.model.named_parameters() if parameter.requires_grad]
    theirs = output(peft.PeftModel.from_pretrained(copy.deepcopy(base), folder))
    torch.testing.assert_close(theirs[:, -expected.shape[1] :], expected, rtol=0, atol=close)
    again = Holder(copy.deepcopy(base))
    if kind == "projected":
        with pytest.raises(
            ValueError, match="a network computed its virtual tokens, and the file does not hold that network"
        ):
            load_adapter_(again, folder, trainable=True)
        return
    load_adapter_(again, folder, trainable=True)
    trains = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_virtual_tokens_of_another_model_are_refused_without_a_tokenizer(tmp_path):
    base = llama()
    model = Holder(copy.deepcopy(base))
    add_prompt_(model, peft.PromptTuningConfig(num_virtual_tokens=3))
    config = model.model.peft_config["default"]
    config.prompt_tuning_init = "TEXT"
    config.prompt_tuning_init_text = "read this"
    config.tokenizer_name_or_path = "someone/model"
    folder = save_adapter(trained(model), tmp_path)
    other = Holder(copy.deepcopy(base))
    load_adapter_(other, folder)
    assert torch.equal(output(other), output(model))
    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "hidden_size": 24}))
    for model, message, check in (
        (Holder(llama()), "the values differ in 'lm_head.weight'", True),
        (Holder(bert()), "this model lacks 'lm_head.weight'", True),
        (Holder(wide), r"'prompt_embeddings' is \[3, 16\], expected \[3, 24\]", False),
        (TinyLM(), "it holds no Hugging Face model", True),
        (copy.deepcopy(base), "Hold it in a module, or use peft", True),
    ):
        keys = list(model.state_dict())
        with pytest.raises((ValueError, TypeError), match=message):
            load_adapter_(model, folder, check_base=check)
        assert list(model.state_dict()) == keys


# Atomic writes


class Died(BaseException):
    pass


def operations(monkeypatch, limit):
    """Kill the process before the operation of this index, counting those that change the folder."""
    done = []

    def counted(original):
        def operation(*args, **kwargs):
            if len(done) == limit:
                raise Died
            done.append(args)
            return original(*args, **kwargs)

        return operation

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    return done


def read(base, folder):
    """Read a folder with this package and with PEFT, and return the output or PEFT's error."""
    found = []
    for load in (load_adapter_, lambda model, folder: peft.PeftModel.from_pretrained(model, folder)):
        model = copy.deepcopy(base)
        try:
            load(model, folder)
            found.append(output(model))
        except ValueError as error:  # raised by PEFT
            found.append(str(error))
    return found


@pytest.mark.parametrize("rank", [2, 3], ids=["same settings", "other settings"])
def test_killed_save_leaves_the_old_adapter_or_the_new_one(rank, tmp_path, monkeypatch):
    base, old = adapted("plain")
    new = copy.deepcopy(base)
    add_adapter_(new, peft.LoraConfig(r=rank, lora_alpha=3), ["up", "0.down"], train=["blocks.1.norm"])
    trained(new, seed=8)
    either, died = [output(old), output(new)], 0
    for limit in range(9):
        folder = tmp_path / str(limit)
        save_adapter(old, folder)
        with monkeypatch.context() as patch:
            done = operations(patch, limit)
            try:
                save_adapter(new, folder)
            except Died:
                died += 1
        ours, theirs = read(base, folder)
        assert any(torch.equal(ours, one) for one in either)  # a valid adapter always exists
        if isinstance(theirs, str):  # never the settings of one with the weights of the other, but briefly no settings
            assert rank == 3
            assert "Can't find 'adapter_config.json'" in theirs
        else:
            assert torch.equal(theirs, ours)
        if len(done) < limit:
            break
    assert died >= (1 if rank == 2 else 3)
    assert torch.equal(ours, either[1])
    assert torch.equal(theirs, either[1])


def test_next_save_removes_leftovers_of_a_killed_save(tmp_path):
    _, model = adapted("plain")
    (tmp_path / ".fasttrain-tmp-adapter_model.safetensors-1-ab").write_bytes(b"half")
    save_adapter(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [CONFIG, WEIGHTS]


def test_other_folders_are_refused_and_other_files_are_kept(tmp_path):
    _, model = adapted("plain")
    (tmp_path / "model.safetensors").write_text("a base")
    with pytest.raises(ValueError, match=r"holds other files than an adapter's: 'model.safetensors'"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="expected a folder, got a file"):
        save_adapter(model, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    folder = save_adapter(model, tmp_path / "deep" / "er")
    (folder / "README.md").write_text("about it")
    save_adapter(trained(model), folder)
    assert sorted(os.listdir(folder)) == ["README.md", CONFIG, WEIGHTS]


def test_only_rank_zero_writes(tmp_path, monkeypatch):
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    _, model = adapted("plain")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert save_adapter(model, tmp_path / "adapter") == tmp_path / "adapter"
    assert not (tmp_path / "adapter").exists()


def test_equal_settings_give_equal_bytes(tmp_path):
    _, model = adapted("bert")
    one, two = save_adapter(model, tmp_path / "one"), save_adapter(copy.deepcopy(trained(model)), tmp_path / "two")
    assert (one / CONFIG).read_bytes() == (two / CONFIG).read_bytes()


@pytest.mark.parametrize("start", ["pissa_niter_4", "corda", "loftq"])
def test_initialization_that_cannot_be_repeated_is_refused(start, tmp_path):
    _, model = adapted("plain")
    model.peft_config["default"].init_lora_weights = start
    with pytest.raises(ValueError, match=f"adapter 'default' was initialized with init_lora_weights='{start}'"):
        save_adapter(model, tmp_path)


def test_sharded_model_is_refused(tmp_path):
    _, model = adapted("plain")
    layer = model.blocks[0].up.lora_A["default"]
    layer.weight = nn.Parameter(torch.empty(0))  # as ZeRO leaves them
    with pytest.warns(UserWarning, match="invalid shape"), pytest.raises(ValueError, match="the model is sharded"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_adapter_named_like_a_module_is_refused(tmp_path):
    with pytest.raises(ValueError, match="adapter 'blocks': a module of the model has this name"):
        adapted("plain", name="blocks")
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up"]), TinyLM(), "blocks")
    with pytest.raises(ValueError, match="adapter 'blocks': a module of the model has this name"):
        save_adapter(model, tmp_path)
    base, model = adapted("plain")
    with pytest.raises(ValueError, match="adapter 'norm': a module of the model has this name"):
        load_adapter_(base, save_adapter(model, tmp_path), name="norm")
    with pytest.raises(ValueError, match="name='a.b'"):
        load_adapter_(base, tmp_path, name="a.b")
