"""Language models train with the same loss and gradients without storing logits, including Hugging Face's."""

import copy

import lightning as L
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import lightning_fasttrain as ft
from lightning_fasttrain.loss import FusedLossHead, fuse_loss_head_
from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.profiling import PeakMemory
from tests.support.nets import ShallowLM, as_loader, gradients, largest_difference, lm_batches, sgd, trainer, weights

VOCAB, LENGTH = 97, 11
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
BART = {
    **{"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 0},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
MODELS = {
    "llama": ("LlamaConfig", SMALL),
    "llama, tied": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {**GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "qwen3": ("Qwen3Config", SMALL),
    "gemma2, soft-capped": ("Gemma2Config", {**SMALL, "final_logit_softcapping": 2.0}),
    "cohere, scaled": ("CohereConfig", {**SMALL, "logit_scale": 0.25}),
    "granite, scaled": ("GraniteConfig", {**SMALL, "logits_scaling": 3.0}),
    "phi, with bias": ("PhiConfig", SMALL),
    "mixtral, with a loss of its router": ("MixtralConfig", {**SMALL, "output_router_logits": True}),
    "t5, nothing shifted": ("T5Config", {**T5, "decoder_start_token_id": 0}),
    "bart, with a bias after its head": ("BartConfig", BART),
    "bert, masked": ("BertConfig", {**SMALL, "tie_word_embeddings": True}),
}


def build(name="llama"):
    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    auto = {
        "T5Config": AutoModelForSeq2SeqLM,
        "BartConfig": AutoModelForSeq2SeqLM,
        "BertConfig": AutoModelForMaskedLM,
    }.get(kind, AutoModelForCausalLM)
    torch.manual_seed(0)
    model = auto.from_config(config).eval()  # no dropout; as `from_pretrained` returns it
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)  # logits that differ, biases too
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_(std=0.2)
    return model


def batch(size=3):
    ids = torch.randint(1, VOCAB, (size, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 6:] = labels[-1, :3] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    loss = model(**{**batch(), **inputs})[0]
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def agree(expected, seen, tolerance=1e-5):
    assert expected.keys() == seen.keys()
    for name, value in expected.items():
        error = (seen[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name} differs by {error}"


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name):
    model, fused = build(name), build(name)
    heads = fuse_loss_head_(fused)
    agree(loss_and_gradients(model), loss_and_gradients(fused))
    assert all(head.used for head in heads.values())


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 5, "labels": batch()["input_ids"]},
        {"shift_labels": torch.roll(batch()["labels"], -1, 1)},
        {"return_dict": False},
        {"use_cache": False, "output_hidden_states": True},
    ],
    ids=lambda inputs: next(iter(inputs)),
)
def test_arguments_of_cross_entropy_are_respected(inputs):
    model, fused = build(), build()
    fuse_loss_head_(fused)
    agree(loss_and_gradients(model, **inputs), loss_and_gradients(fused, **inputs))


def test_a_custom_bias_and_log_softmax_with_nll_loss_are_supported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
            self.offset = nn.Parameter(torch.linspace(-1, 1, VOCAB))

        def forward(self, input_ids, labels):
            scores = F.log_softmax(0.5 * self.head(self.embed(input_ids)) + self.offset, dim=-1)
            return (F.nll_loss(scores.flatten(0, 1), labels.flatten()),)

    model = Net()
    fused = copy.deepcopy(model)
    fuse_loss_head_(fused, "head")
    agree(loss_and_gradients(model), loss_and_gradients(fused))


@pytest.mark.parametrize("name", ["llama, tied", "gemma2, soft-capped"])
def test_z_loss_is_added_to_the_models_own_loss_in_training_only(name):
    model, fused = build(name), build(name)
    (head,) = fuse_loss_head_(fused, z_loss=1e-2).values()

    def with_z_loss(**inputs):
        out = model(**inputs)
        counted = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
        return (out.loss + 1e-2 * out.logits.logsumexp(-1)[counted].square().mean(),)

    with_z_loss.zero_grad, with_z_loss.named_parameters = model.zero_grad, model.named_parameters
    agree(loss_and_gradients(with_z_loss), loss_and_gradients(fused))
    assert head.used
    with torch.no_grad():
        assert fused(**batch()).loss == model(**batch()).loss


@pytest.mark.parametrize("weighted", [False, True])
def test_class_weights_and_label_smoothing_of_a_loss_stay(weighted):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
            self.loss = nn.CrossEntropyLoss(torch.linspace(0, 2, VOCAB) if weighted else None, label_smoothing=0.2)

        def forward(self, input_ids, labels):
            return (self.loss(self.head(self.embed(input_ids)).transpose(1, 2), labels),)

    model = Net()
    fused = copy.deepcopy(model)
    (head,) = fuse_loss_head_(fused).values()
    for _ in range(2):  # the first step finds the head
        agree(loss_and_gradients(model), loss_and_gradients(fused))
    assert head.used


def test_a_backend_without_z_loss_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match=r"z_loss=0.01 with backend='torch'.*Use backend='chunked'"):
        fuse_loss_head_(build(), z_loss=1e-2, backend="torch")


def test_only_z_loss_changes_training():
    assert FusedLossHead().exactness is ft.technique.Exactness.EXACT
    assert FusedLossHead(z_loss=1e-4).exactness is ft.technique.Exactness.CHANGES_TRAINING


def test_negative_control_a_loss_of_unshifted_labels_differs():
    fused = build()
    fuse_loss_head_(fused)
    expected = loss_and_gradients(build())["loss"]
    assert abs(loss_and_gradients(fused, shift_labels=batch()["labels"])["loss"] - expected) > 1e-2


def test_logits_are_deferred_in_training_and_real_without_gradients():
    model, fused = build(), build()
    fuse_loss_head_(fused)
    out = fused.train()(**batch())
    assert isinstance(out.logits, DeferredLogits)
    assert out.logits.shape == (3, LENGTH, VOCAB)
    with torch.no_grad():
        assert torch.equal(fused(**batch()).logits, model(**batch()).logits)
        assert fused(**batch()).loss == model(**batch()).loss
    prompt = {"inputs": batch()["input_ids"][:, :4], "attention_mask": torch.ones(3, 4), "max_new_tokens": 3}
    assert torch.equal(fused.generate(**prompt, do_sample=False), model.generate(**prompt, do_sample=False))


def test_the_loss_may_be_outside_of_autocast():
    def run(head, hidden, targets):
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(hidden)
        F.cross_entropy(logits.float(), targets).backward()
        return {"hidden": hidden.grad.clone(), **gradients(head)}

    torch.manual_seed(0)
    model, hidden, targets = nn.Linear(64, 512), torch.randn(256, 64, requires_grad=True), torch.randint(512, (256,))
    truth = run(copy.deepcopy(model).double(), hidden.detach().double().requires_grad_(), targets)
    plain = run(copy.deepcopy(model), hidden.detach().requires_grad_(), targets)
    net = nn.Sequential(copy.deepcopy(model))
    fuse_loss_head_(net, "0")
    fused = run(net[0], hidden.detach().requires_grad_(), targets)
    assert not torch.equal(fused["weight"], truth["weight"].float())
    for name, value in truth.items():
        assert (fused[name] - value).norm() <= 1.1 * (plain[name] - value).norm()  # each chunk's product is rounded


def test_peak_memory_does_not_contain_the_logits():
    def added(name):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**{**SMALL, "vocab_size": 8192, "max_position_embeddings": 512})
        model = AutoModelForCausalLM.from_config(config)
        if name == "fused":
            fuse_loss_head_(model)
        ids = torch.randint(8192, (4, 512))
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        with PeakMemory("cpu", model, ids) as peak:
            model(input_ids=ids, labels=ids).loss.backward()
        return peak.added_bytes

    logits = 4 * 512 * 8192 * 4
    assert added("plain") > 2 * logits
    assert added("fused") < 0.5 * logits


def test_a_named_head_may_be_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

        def forward(self, ids):
            x = self.table(ids)
            return sum(F.cross_entropy(self.out(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for h in (x, x.tanh()))

    model = Twice()
    fused = copy.deepcopy(model)
    assert list(fuse_loss_head_(fused, "out")) == ["out"]
    for net in (model, fused):
        net(batch()["input_ids"]).backward()
    agree(gradients(model), gradients(fused))


def test_fusing_is_idempotent_and_can_be_undone():
    model = build()
    keys, heads = list(model.state_dict()), fuse_loss_head_(model)
    assert fuse_loss_head_(model) == {}
    assert list(model.state_dict()) == keys
    heads["lm_head"].undo()
    assert "forward" not in vars(model.lm_head)
    assert model(**batch()).logits.requires_grad


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (None, "no submodule has get_output_embeddings.*widest linear layers are 'blocks.0.up'"),
        ("lm_head", "head='lm_head' in ShallowLM: no such layer"),
    ],
)
def test_a_missing_head_is_refused(head, message):
    net = ShallowLM()
    net.head = nn.Identity()
    with pytest.raises(ValueError, match=message):
        fuse_loss_head_(net, head)


def test_a_head_other_than_a_plain_linear_layer_is_refused():
    class Adapted(nn.Linear):
        pass

    model = build()
    model.set_output_embeddings(Adapted(16, VOCAB))
    with pytest.raises(TypeError, match="head 'lm_head' is a Adapted.*Exclude the head from quantization and adapters"):
        fuse_loss_head_(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"chunk": 0}, "chunk=0"), ({"backend": "magic"}, "backend='magic'"), ({"z_loss": -1.0}, "z_loss=-1.0")],
)
def test_invalid_settings_of_the_fused_head_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FusedLossHead(**settings)


class HuggingFace(L.LightningModule):
    """The shortest way to train such a model, whose output is a mapping with a loss."""

    def __init__(self, model):
        super().__init__()
        self.model, self.accuracy = model, []

    def training_step(self, batch, batch_idx):
        return self.model(**batch)

    def validation_step(self, batch, batch_idx):
        self.accuracy.append((self.model(**batch).logits.argmax(-1) == batch["labels"]).float().mean())

    def configure_optimizers(self):
        return sgd(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "others",
    [
        lambda: [],
        lambda: [ft.MicroBatching(2, count=ft.micro_batching.count_next_tokens), ft.ActivationCheckpointing()],
        lambda: [
            ft.CompileBlocks(backend="eager"),
            ft.TokenWeightedAccumulation(1, count=ft.micro_batching.count_next_tokens),
        ],
    ],
    ids=["alone", "MicroBatching+ActivationCheckpointing", "CompileBlocks+TokenWeightedAccumulation"],
)
def test_it_composes_with_other_techniques_in_a_trainer(others):
    torch._dynamo.reset()
    batches = [batch(4), batch(3)]
    ends = []
    for techniques in ([], [FusedLossHead(), *others()]):
        module = HuggingFace(build())
        trainer(techniques).fit(module, as_loader(batches), as_loader(batches))
        ends.append(weights(module))
        assert len(module.accuracy) == 4
    assert largest_difference(*ends) <= 1e-5
    assert largest_difference(ends[0], weights(HuggingFace(build()))) > 1e-3


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_a_peft_model_can_be_fused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(peft.get_peft_model(build(), config))
    assert list(fuse_loss_head_(nets[1])) == ["base_model.model.lm_head"]
    agree(*(loss_and_gradients(net) for net in nets))
    adapted = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(TypeError, match="Exclude the head from quantization and adapters"):
        fuse_loss_head_(adapted)


def test_a_completely_compiled_model_computes_its_logits_with_a_log_line():
    class Whole(ShallowLM):
        def build(self):
            super().build()
            self.compiled = torch.compile(super().forward, backend="eager")

        def forward(self, ids):
            return self.compiled(ids)

    torch._dynamo.reset()
    batches, fit = lm_batches(2), trainer([FusedLossHead("head")])
    with pytest.warns(ft.FastTrainWarning, match="FusedLossHead did nothing in the first batch.*Compile the blocks"):
        fit.fit(module := Whole(), as_loader(batches))
    trainer().fit(plain := ShallowLM(), as_loader(batches))
    assert largest_difference(weights(plain), weights(module)) <= 1e-6
