"""Virtual tokens act like real ones with the same embeddings, equal PEFT's, and change nothing else."""

import copy
import functools
import pickle
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import (
    PrefixTuning,
    PromptTuning,
    add_prompt_,
    load_adapter_,
    prompt_tuning,
    save_adapter,
)
from tests.support.nets import ShallowLM, as_loader, gradients, largest_difference, trainer, trains, weights

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
# PEFT itself uses the deprecated attribute; and generate computes positions, which PEFT then ignores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def skip_what_this_peft_cannot(monkeypatch, request):
    """Skip a test at a refusal of the installed versions, which a test of its own is about."""
    refuse = prompt_tuning.refuse_renamed_cache

    def skip_if_refused(what):
        try:
            refuse(what)
        except RuntimeError as error:
            pytest.skip(str(error))

    if "versions" not in request.fixturenames:
        monkeypatch.setattr(prompt_tuning, "refuse_renamed_cache", skip_if_refused)


@pytest.mark.parametrize(
    ("versions", "is_refused"),
    [
        ({"peft": "0.21.2", "transformers": "5.23.1"}, False),
        ({"peft": "0.21.2", "transformers": "5.24.0"}, True),
        ({"peft": "0.22.0", "transformers": "5.24.0"}, False),
    ],
)
def test_a_renamed_cache_is_refused_where_peft_does_not_know_the_name(versions, is_refused, monkeypatch):
    monkeypatch.setattr(prompt_tuning, "version", versions.get)

    def expected():
        if is_refused:
            return pytest.raises(RuntimeError, match=r"which transformers 5\.24\.0 calls cache\. Install")
        return nullcontext()

    with expected():
        add(seeded(llama), "prefix")
    prompted = add(seeded(llama))
    monkeypatch.setattr(type(prompted), "generate", lambda *args, **kwargs: "generated")
    with expected():
        assert prompted.generate(torch.tensor([PROMPT])) == "generated"


def llama(kind="LlamaForCausalLM"):  # one key head for two query heads
    return getattr(transformers, kind)(transformers.LlamaConfig(**SIZE, **ENDS, num_key_value_heads=1))


def llama_classifier():
    return llama("LlamaForSequenceClassification")


def gpt2():
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32, **ENDS)
    return transformers.GPT2LMHeadModel(config)


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZE, max_position_embeddings=32))


def bare_bert():
    return transformers.BertModel(transformers.BertConfig(**SIZE))


def t5():
    config = transformers.T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=50)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def seeded(make, scale=1.0):
    """Build the same weights each time, large enough for tokens to matter, and without dropout."""
    return copy.deepcopy(_built(make, scale))


@functools.cache
def _built(make, scale):
    torch.manual_seed(5)
    model = make().eval()
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1)
    return model


class Module(L.LightningModule):
    def __init__(self, make, scale=1.0):
        super().__init__()
        self.net = seeded(make, scale)

    def training_step(self, batch, batch_idx):
        return self.net(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def batch(make, seed=0, size=4, length=5):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (size, length), generator=g)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # padded on the left
    labels = torch.randint(2, (size,), generator=g) if make in (bert, llama_classifier) else ids.clone()
    return {"input_ids": ids, "attention_mask": mask, **({} if make is bare_bert else {"labels": labels})}


PROMPT = [7, 31, 12]
TASKS = {llama: "CAUSAL_LM", gpt2: "CAUSAL_LM", bert: "SEQ_CLS", llama_classifier: "SEQ_CLS", t5: "SEQ_2_SEQ_LM"}
KINDS = {
    "prompt": lambda task=None: peft.PromptTuningConfig(num_virtual_tokens=3, task_type=task),
    "p-tuning": lambda task=None: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type=task),
    "prefix": lambda task=None: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type=task),
    "projected": lambda task=None: peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, task_type=task
    ),
}
every_model = pytest.mark.parametrize("make", [*TASKS, bare_bert])
every_kind = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("technique", [PromptTuning, PrefixTuning])


def add(model, kind="prompt", **kwargs):
    """Add a prompt and return PEFT's model, which has replaced this one in a module."""
    holder = nn.ModuleDict({"lm": model})
    torch.manual_seed(1)
    assert add_prompt_(holder, KINDS[kind](), **kwargs) == "lm"
    return holder["lm"]


def like_real_tokens(model, kind):
    """Give the virtual tokens the embeddings of the real tokens of ``PROMPT``."""
    tokens = torch.tensor([PROMPT])
    cache = None if kind == "prompt" else model(tokens, use_cache=True).past_key_values
    prompted = add(model, kind)
    weight = prompted.prompt_encoder["default"].embedding.weight.data
    if kind == "prompt":
        weight.copy_(model.get_input_embeddings()(tokens)[0])
    else:  # [tokens, layers · (keys, values), heads, width]
        held = [part[0].transpose(0, 1) for layer in cache.layers for part in (layer.keys, layer.values)]
        weight.copy_(torch.stack(held, dim=1).flatten(1))
    return prompted


def behind_real_tokens(given):
    ids, mask = given["input_ids"], given["attention_mask"]
    tokens = torch.tensor([PROMPT]).expand(len(ids), -1)
    return {"input_ids": torch.cat([tokens, ids], 1), "attention_mask": torch.cat([torch.ones_like(tokens), mask], 1)}


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_virtual_tokens_with_real_embeddings_act_like_real_tokens(make, kind):
    model, given = seeded(make, 4), batch(make)
    del given["labels"]
    expected = model(**behind_real_tokens(given)).logits[:, 3:]
    assert not torch.allclose(model(**given).logits, expected, atol=1e-2)
    torch.testing.assert_close(like_real_tokens(model, kind)(**given).logits, expected)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_generation_equals_that_after_real_tokens(make, kind, how):
    model, given = seeded(make, 8), batch(make)
    del given["labels"]
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **how}
    given["attention_mask"][:] = 1  # padding has other positions in generation than in a forward
    without = model.generate(**given, **how)[:, 5:]
    expected = model.generate(**behind_real_tokens(given), **how)[:, 8:]
    ids = given.pop("input_ids")
    assert torch.equal(like_real_tokens(model, kind).generate(ids, **given, **how)[:, 5:], expected)
    assert not torch.equal(without, expected)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_generation_after_padding_agrees_with_the_forward(kind):
    model, given = seeded(llama, 8), batch(llama)
    tokens, mask = given["input_ids"], given["attention_mask"]
    model = add(model, kind)
    results = model.generate(tokens, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    for _ in range(6):
        # In generation padding uses no positions before a prefix, but it does before a prompt.
        positions = (mask.cumsum(1) - 1).clamp(min=0) if kind == "prefix" else None
        logits = model(tokens, mask, position_ids=positions).logits[:, -1]
        logits[:, 2] = -torch.inf  # the end token, which min_new_tokens forbids
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    assert torch.equal(results, tokens)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_encoder_decoder_generation_agrees_with_the_forward(kind):
    model, given = seeded(t5, 6), batch(t5)
    del given["labels"]
    without = model.generate(**given, max_new_tokens=5, min_new_tokens=5)
    model = add(model, kind)
    tokens = torch.zeros(4, 1, dtype=torch.long)
    for _ in range(5):
        logits = model(**given, decoder_input_ids=tokens).logits[:, -1]
        logits[:, 1] = -torch.inf  # the end token, which min_new_tokens forbids
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(**given, max_new_tokens=5, min_new_tokens=5), tokens)
    assert not torch.equal(without, tokens)


@pytest.mark.parametrize("make", [llama, t5])
def test_generation_always_uses_the_prefix(make):
    model, given = seeded(make), batch(make)
    del given["labels"]
    prompted = add(model, "prefix")
    with pytest.raises(ValueError, match="the cache holds the prefix"):
        prompted.generate(**given, max_new_tokens=2, use_cache=False)
    with ft.finetune.base_model(prompted):
        prompted.generate(**given, max_new_tokens=2, use_cache=False)
    with pytest.raises(ValueError, match="the cache holds the prefix"):
        prompted.generate(**given, max_new_tokens=2, use_cache=False)
    assert len(add(seeded(make), "prompt").generate(**given, max_new_tokens=2, use_cache=False)) == 4


@every_kind
@every_model
def test_output_and_gradients_are_bitwise_those_of_pefts_model(make, kind):
    model, other, given = seeded(make), seeded(make), batch(make)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(other, KINDS[kind](TASKS.get(make, "FEATURE_EXTRACTION"))).eval()
    model = add(model, kind)
    key = "last_hidden_state" if make is bare_bert else "logits"
    a, b = theirs(**given), model.eval()(**given)
    assert torch.equal(a[key][:, -b[key].shape[1] :], b[key])
    for output in (a, b):
        (output[key][:, -5:].square().sum() if make is bare_bert else output.loss).backward()
    wanted = gradients(theirs)
    assert all(float(g.abs().max()) > 0 for g in wanted.values())
    assert largest_difference(wanted, gradients(model)) == 0


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@every_model
def test_the_output_is_as_long_as_the_input(make, kind):
    model, given = seeded(make), batch(make)
    plain = model(**given, output_hidden_states=True)
    output = add(model, kind)(**given, output_hidden_states=True)
    for name in set(plain) - {"past_key_values", "cache"}:
        parts = [one if isinstance(one, tuple) else (one,) for one in (plain[name], output[name])]
        assert [part.shape for part in parts[0]] == [part.shape for part in parts[1]]


def test_positional_arguments_and_input_embeddings_work():
    model, given = add(seeded(llama)), batch(llama)
    expected = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    assert torch.equal(model(given["input_ids"], given["attention_mask"]).logits, expected)
    embedded = model.get_input_embeddings()(given["input_ids"])
    assert torch.equal(model(inputs_embeds=embedded, attention_mask=given["attention_mask"]).logits, expected)
    last = model(given["input_ids"], given["attention_mask"], logits_to_keep=1).logits
    torch.testing.assert_close(last, expected[:, -1:])


@both
def test_only_virtual_tokens_train_and_the_inner_model_is_unchanged(technique):
    module, plain = Module(llama), Module(llama)
    trainer([technique(3)]).fit(module, as_loader([batch(llama, seed) for seed in range(3)]))
    new = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert new == ["net.prompt_encoder.default.embedding.weight"]
    assert isinstance(module.net, peft.PeftModelForCausalLM)
    assert largest_difference(weights(plain.net), weights(module.net.base_model)) == 0
    assert list(ft.finetune.trained_state(module)) == new
    assert ft.finetune.base_fingerprint(module) == ft.finetune.base_fingerprint(plain)


def test_model_with_two_names_keeps_both():
    module = Module(llama)
    module.also = module.net
    ft.apply(module, [PromptTuning(3)])
    assert module.also is module.net


@pytest.mark.parametrize("make", [llama, bert, t5])
def test_prefix_learns_in_an_untrained_model(make):
    module, given = Module(make, 6), batch(make)
    ft.apply(module, [PrefixTuning(4)])
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.3)
    losses = []
    for _ in range(30):
        loss = module.net(**given).loss
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(losses[-1]) < 0.8 * float(losses[0])


def test_classifier_heads_and_named_modules_train_as_in_peft():
    model = add(seeded(bert), train=["bert.pooler"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    stems = "base_model.bert.pooler.modules_to_save.default.dense", "base_model.classifier.modules_to_save.default"
    whole = [f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]
    assert trained == [*whole, "prompt_encoder.default.embedding.weight"]


def test_prompts_can_be_initialized_from_token_ids():
    module = Module(llama)
    ft.apply(module, [PromptTuning(5, start=PROMPT)])
    weight = module.net.prompt_encoder["default"].embedding.weight
    expected = module.net.get_input_embeddings().weight[torch.tensor([7, 31, 12, 7, 31])]
    assert torch.equal(weight, expected)
    weight.data.zero_()  # as if trained
    ft.apply(module, [PromptTuning(5, start=PROMPT)])
    assert not weight.any()


def test_prompts_are_initialized_from_the_vocabulary_by_default():
    for start, inside in (("vocabulary", True), ("random", False)):
        module = Module(llama)
        rows = module.net.get_input_embeddings().weight
        ft.apply(module, [PromptTuning(5, start=start)])
        mine = module.net.prompt_encoder["default"].embedding.weight
        assert all(bool((row == rows).all(1).any()) for row in mine) is inside


@every_kind
@pytest.mark.parametrize("make", [llama, bert, t5])
def test_copies_and_pickles_are_independent(make, kind):
    model, given = add(seeded(make), kind), batch(make)
    expected = model(**given).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**given).logits, expected)
        other.prompt_encoder["default"].embedding.weight.data.add_(1)
        assert not torch.equal(other(**given).logits, expected)
        assert torch.equal(model(**given).logits, expected)


def test_copies_generate_independently():
    model, given = add(seeded(gpt2, 8)), batch(gpt2)
    other = copy.deepcopy(model)
    other.prompt_encoder["default"].embedding.weight.data.normal_(std=3)
    results = [m.generate(given["input_ids"], max_new_tokens=6, min_new_tokens=6) for m in (model, other)]
    assert not torch.equal(*results)


def test_several_prompts_are_selected_by_name():
    holder, given = nn.ModuleDict({"lm": seeded(llama)}), batch(llama)
    plain = holder["lm"](**given).logits
    outputs = {}
    for name in ("one", "two"):
        add_prompt_(holder, KINDS["prefix"](), name=name)
        outputs[name] = holder["lm"](**given).logits
    assert ft.finetune.adapter_names(holder) == ["one", "two"]
    assert not torch.equal(outputs["one"], outputs["two"])
    ft.finetune.use_adapter_(holder, "one")
    assert torch.equal(holder["lm"](**given).logits, outputs["one"])
    assert trains(holder) == ["lm.prompt_encoder.one.embedding.weight"]
    with ft.finetune.base_model(holder):
        assert torch.equal(holder["lm"](**given).logits, plain)
    assert torch.equal(holder["lm"](**given).logits, outputs["one"])
    with pytest.raises(ValueError, match="only one set of virtual tokens"):
        ft.finetune.use_adapter_(holder, ["one", "two"])


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("make", [llama, t5])
def test_generation_with_disabled_adapters_equals_the_base_models(make, kind):
    model, given = seeded(make, 8), batch(make)
    expected = model.generate(input_ids=given["input_ids"], max_new_tokens=4)
    prompted = add(model, kind)
    changed = prompted.generate(input_ids=given["input_ids"], max_new_tokens=4)
    ft.finetune.enable_adapters_(prompted, False)
    assert torch.equal(prompted.generate(input_ids=given["input_ids"], max_new_tokens=4), expected)
    ft.finetune.enable_adapters_(prompted)
    assert torch.equal(prompted.generate(input_ids=given["input_ids"], max_new_tokens=4), changed)


def test_adding_twice_equals_once_and_another_prompt_is_refused():
    for make in (llama, bert):
        for kind in KINDS:
            holder = nn.ModuleDict({"lm": seeded(make)})
            assert add_prompt_(holder, KINDS[kind]()) == add_prompt_(holder, KINDS[kind]()) == "lm"
            assert type(holder["lm"].base_model).__name__ == make().__class__.__name__
    holder = nn.ModuleDict({"lm": add(seeded(llama), "projected")})
    with pytest.raises(ValueError, match="with another num_virtual_tokens"):
        ft.apply(holder, [PrefixTuning(4, projection=8)])
    with pytest.raises(ValueError, match="PROMPT_TUNING beside PREFIX_TUNING"):
        ft.apply(holder, [PromptTuning(3, name="other")])
    with pytest.raises(ValueError, match="LORA beside PREFIX_TUNING"):
        ft.apply(holder, [ft.LoRA(2)])
    lora = nn.ModuleDict({"lm": seeded(llama)})
    ft.apply(lora, [ft.LoRA(2)])
    with pytest.raises(ValueError, match="PROMPT_TUNING beside LORA"):
        ft.apply(lora, [PromptTuning(3)])


@pytest.mark.parametrize("make", [llama, bert])
def test_prompts_can_be_unloaded(make):
    model, given = seeded(make), batch(make)
    before, output = parts(model), model(**given).logits
    holder = nn.ModuleDict({"lm": add(model)})
    with pytest.raises(ValueError, match="virtual tokens are prepended to the input and cannot be merged into weights"):
        ft.finetune.unload_adapters_(holder)
    assert ft.finetune.unload_adapters_(holder, merge=False) is holder
    assert holder["lm"] is model
    assert parts(model) == before
    assert torch.equal(model(**given).logits, output)


def test_existing_peft_prompt_model_is_used_as_it_is():
    module, given = Module(llama), batch(llama)
    module.net = peft.get_peft_model(module.net, KINDS["prompt"]("CAUSAL_LM"))
    net, keys = module.net, list(module.state_dict())
    ft.apply(module, [PromptTuning(3, start="random")])
    assert module.net is net
    assert list(module.state_dict()) == keys
    assert ft.finetune.trained_names(module) == ["net.prompt_encoder.default.embedding.weight"]
    assert ft.finetune.unload_adapters_(net, merge=False)(**given).logits.shape[1] == 5


BATCHES = [batch(llama, seed) for seed in range(4)]


def gradients_with(make, techniques, given=None):
    module = Module(make)
    torch.manual_seed(1)
    with ft.apply(module, techniques):
        module.net(**(given or batch(make))).loss.backward()
    return gradients(module)


@both
@pytest.mark.parametrize("make", [llama, bert, t5])
def test_recomputed_blocks_give_the_same_gradients(make, technique):
    expected = gradients_with(make, [technique(3)])
    assert largest_difference(expected, gradients_with(make, [technique(3), ft.ActivationCheckpointing()])) < 1e-6


@pytest.mark.parametrize(("make", "technique"), [(llama, PromptTuning), (bert, PrefixTuning), (t5, PrefixTuning)])
def test_compiled_blocks_give_the_same_gradients(make, technique):
    torch._dynamo.reset()
    expected = gradients_with(make, [technique(3)])
    compiled = ft.CompileBlocks(backend="eager")
    assert largest_difference(expected, gradients_with(make, [technique(3), compiled])) < 1e-6


def test_a_prefix_needs_no_new_graph_at_each_step():
    expected, module = gradients_with(llama, [PrefixTuning(3)], BATCHES[0]), Module(llama)
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    torch.manual_seed(1)
    with ft.apply(module, [PrefixTuning(3), ft.CompileBlocks(backend="eager")]):
        module.net(**BATCHES[0]).loss.backward()
        assert largest_difference(expected, gradients(module)) < 1e-6
        graphs, breaks = counted["stats"]["unique_graphs"], dict(counted["graph_break"])
        for given in BATCHES[1:]:
            module.net(**given).loss.backward()
    assert counted["stats"]["unique_graphs"] == graphs > 0
    assert dict(counted["graph_break"]) == breaks


@both
def test_the_fused_loss_head_gives_the_same_gradients(technique):
    expected = gradients_with(llama, [technique(3)])
    assert largest_difference(expected, gradients_with(llama, [technique(3), ft.FusedLossHead()])) < 1e-5


@both
def test_micro_batches_give_the_same_weights(technique):
    ends = []
    for more in ([], [ft.MicroBatching(2)]):
        module = Module(llama)
        torch.manual_seed(1)
        trainer([technique(3), *more]).fit(module, as_loader(BATCHES[:1]))
        ends.append(ft.finetune.trained_state(module))
    assert largest_difference(*ends) < 1e-4


@pytest.mark.parametrize(
    "technique", [lambda: PromptTuning(3), lambda: PrefixTuning(3), lambda: PrefixTuning(3, projection=True)]
)
def test_resumed_equals_uninterrupted_bit_for_bit(technique, tmp_path):
    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole, resumed = Module(llama), Module(llama)
    torch.manual_seed(1)
    trainer([technique(), Save()], max_epochs=2).fit(whole, as_loader(BATCHES))
    t = trainer([technique()], max_epochs=2)
    t.fit(resumed, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    held = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
    assert all(name.startswith("net.prompt_encoder.default.") for name in held)


def test_second_fit_continues_with_the_same_tokens():
    module, technique = Module(llama), PrefixTuning(3)
    trainer([technique]).fit(module, as_loader(BATCHES))
    once = weights(module)
    trainer([technique]).fit(module, as_loader(BATCHES))
    assert list(weights(module)) == list(once)
    assert largest_difference(once, weights(module)) > 0


@both
def test_half_precision_base_and_mixed_precision_work(technique):
    half = Module(llama).bfloat16()
    ft.apply(half, [technique(3)])
    assert half.net.prompt_encoder["default"].embedding.weight.dtype is torch.float32
    half.net(**BATCHES[0]).loss.backward()
    mixed = Module(llama)
    trainer([technique(3)], precision="bf16-mixed").fit(mixed, as_loader(BATCHES[:1]))


@every_kind
@pytest.mark.parametrize("make", [llama, bert])
def test_tensors_in_a_file_equal_pefts(make, kind, tmp_path):
    torch.manual_seed(1)
    theirs = peft.get_peft_model(seeded(make), KINDS[kind](TASKS[make]))
    model = add(seeded(make), kind)
    model.prompt_encoder.load_state_dict(theirs.prompt_encoder.state_dict())
    expected = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    written = safetensors.load_file(save_adapter(model, tmp_path) / "adapter_model.safetensors")
    assert largest_difference(expected, written) == 0


@pytest.mark.parametrize("train", [[], ["bert.pooler"]])
@every_kind
def test_files_are_compatible_with_peft(kind, train, tmp_path):
    model, given = add(seeded(bert), kind, train=train), batch(bert)
    for parameter in model.parameters():
        parameter.data.add_(0.1 if parameter.requires_grad else 0)
    theirs = peft.PeftModel.from_pretrained(seeded(bert), save_adapter(model, tmp_path / "ours")).eval()
    torch.testing.assert_close(theirs(**given).logits, model(**given).logits)
    theirs.save_pretrained(tmp_path / "theirs")
    again = Module(bert)
    assert load_adapter_(again, tmp_path / "theirs") == ["net"]
    torch.testing.assert_close(again.net(**given).logits, model(**given).logits)
    assert trains(again) == []


def test_mismatched_tensors_are_refused_and_nothing_changes(tmp_path):
    folder = save_adapter(add(seeded(bert)), tmp_path)
    file = folder / "adapter_model.safetensors"
    whole = safetensors.load_file(file)
    for changed, message in [
        ({"prompt_embeddings": None}, "'prompt_embeddings' is missing"),
        ({"prompt_embeddings": torch.zeros(4, 16)}, r"'prompt_embeddings' is \[4, 16\], expected \[3, 16\]"),
        ({"base_model.classifier.weight": None}, "'base_model.classifier.weight' is missing"),
        ({"base_model.classifier.weight": torch.zeros(9, 16)}, r"is \[9, 16\], expected \[2, 16\]"),
        ({"more": torch.zeros(1)}, "'more' is .*expected no such tensor"),
        ({"prompt_embeddings": torch.full((3, 16), torch.nan)}, "holds NaN or infinity"),
    ]:
        tensors = {key: tensor for key, tensor in (whole | changed).items() if tensor is not None}
        safetensors.save_file(tensors, file)
        module = Module(bert)
        before = parts(module)
        with pytest.raises(ValueError, match=message):
            load_adapter_(module, folder)
        assert parts(module) == before


def test_file_for_another_task_or_without_token_count_is_refused(tmp_path):
    folder = save_adapter(add(seeded(llama)), tmp_path)
    with pytest.raises(ValueError, match="its task is CAUSAL_LM, and this model's task is SEQ_CLS"):
        load_adapter_(Module(llama_classifier), folder, check_base=False)
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"num_virtual_tokens": 3', '"num_virtual_tokens": null'))
    safetensors.save_file({"prompt_embeddings": torch.zeros(3, 16)}, folder / "adapter_model.safetensors")
    with pytest.raises((ValueError, TypeError), match="num_virtual_tokens=None"):
        load_adapter_(Module(llama), folder)


def test_training_a_projected_prompt_from_a_file_is_refused(tmp_path):
    projected = add(seeded(llama), "projected")
    with pytest.raises(ValueError, match="a network computed its virtual tokens"):
        load_adapter_(projected, save_adapter(projected, tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": True}, "tokens=True"),
        ({"start": "zero"}, "start='zero'"),
        ({"start": []}, "start="),
        ({"start": [-1]}, "start="),
        ({"checkpoint": "whole"}, "checkpoint='whole'"),
    ],
)
def test_bad_settings_are_refused_when_they_are_given(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PromptTuning(**settings)
    if "start" not in settings:
        with pytest.raises((ValueError, TypeError), match=message):
            PrefixTuning(**settings)


def distilbert():
    config = transformers.DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=32, vocab_size=50)
    return transformers.DistilBertForSequenceClassification(config)


def narrow_electra():
    return transformers.ElectraForSequenceClassification(transformers.ElectraConfig(**SIZE, embedding_size=8))


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
@pytest.mark.parametrize("make", [distilbert, narrow_electra])
def test_unusual_config_names_and_narrow_embeddings_work(make, kind):
    model = seeded(make)
    before = model(**batch(bert)).logits
    assert not torch.equal(add(model, kind)(**batch(bert)).logits, before)


def test_activation_checkpointing_works_with_sliding_window_attention():
    config = transformers.Gemma2Config(**SIZE, **ENDS, num_key_value_heads=1, head_dim=8, sliding_window=4)
    make = lambda: transformers.Gemma2ForCausalLM(config)  # noqa: E731
    expected = gradients_with(make, [PrefixTuning(3)], batch(llama))
    again = gradients_with(make, [PrefixTuning(3), ft.ActivationCheckpointing()], batch(llama))
    assert largest_difference(expected, again) == 0


def recomputing():
    model = llama()
    model.activation_checkpointing_enable()
    return model


def token_classifier():
    return transformers.BertForTokenClassification(transformers.BertConfig(**SIZE))


@pytest.mark.parametrize(
    ("make", "technique", "error", "message"),
    [
        (ShallowLM, PromptTuning(3), TypeError, "holds no Hugging Face model.*Use LoRA"),
        (lambda: nn.ModuleList([llama(), llama()]), PromptTuning(3), ValueError, r"'net.0', 'net.1'"),
        (token_classifier, PromptTuning(3), TypeError, "BertForTokenClassification, of task unknown"),
        (recomputing, PrefixTuning(3), ValueError, "does not work with gradient checkpointing"),  # PEFT says
        (llama, PromptTuning(3, start=[99]), ValueError, "start holds token id 99: the vocabulary has 50 tokens"),
        (llama, PromptTuning(3, train=["embed"]), ValueError, "train='embed'"),
        (llama, PromptTuning(3, name="a.b"), ValueError, "name='a.b'"),
        (lambda: nn.ModuleDict({"lm": llama(), "head": nn.Linear(4, 4)}), PromptTuning(3, train=["head"]), ValueError,
         "train='head' matches nothing in LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused_and_nothing_changes(make, technique, error, message):
    module = Module(make)
    before = trains(module), parts(module), list(vars(module.net))
    with pytest.raises(error, match=message):
        ft.apply(module, [technique])
    assert before == (trains(module), parts(module), list(vars(module.net)))


def test_model_without_a_parent_module_is_refused():
    with pytest.raises(ValueError, match=r"Hold it in a module, or use peft.get_peft_model\(model, config\)"):
        add_prompt_(llama(), KINDS["prompt"]())


def parts(model):
    return list(model.state_dict()), [type(part) for part in model.modules()]


def test_other_configurations_than_virtual_tokens_are_refused():
    with pytest.raises(TypeError, match="config is a LoraConfig"):
        add_prompt_(llama(), peft.LoraConfig(r=2))
    with pytest.raises(TypeError, match="config is a dict"):
        add_prompt_(llama(), {"num_virtual_tokens": 2})
    with pytest.raises(TypeError, match=r"Use add_prompt_\(model, config\)"):
        ft.finetune.add_adapter_(llama(), KINDS["prompt"]())


def test_caches_with_virtual_tokens_and_tuple_outputs_are_refused():
    model, given = add(seeded(llama)), batch(llama)
    with pytest.raises(ValueError, match="a cache passed to a PeftModelForCausalLM"):
        model(**given, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="cannot be identified in a tuple"):
        model(**given, return_dict=False)


def test_the_peak_with_virtual_tokens_is_predicted_within_five_per_cent():
    from tests.memory.test_predict_memory import SMALL, measured

    techniques = [PrefixTuning(8), ft.ActivationCheckpointing()]
    report = ft.predict_memory(SMALL["llama"].module, SMALL["llama"].batch(), techniques=techniques, device="cpu")
    assert measured(SMALL["llama"], techniques) == pytest.approx(report.peak_bytes, rel=0.05)
