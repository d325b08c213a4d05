"""A distilled student takes the same steps as a loop that computes both logits and mixes the losses by hand."""

import copy
import functools
import gc
import tempfile
import weakref
from functools import partial

import lightning as L
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import lightning_fasttrain as ft
from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.loss import Distillation, distil_into, fuse_loss_head_
from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.loss.loss_inputs import student_of
from lightning_fasttrain.profiling import PeakMemory
from tests.loss.test_fused_loss_head import MODELS, HuggingFace
from tests.loss.test_fused_loss_head import batch as hf_batch
from tests.support import nets
from tests.support.nets import (
    DIM,
    VOCAB,
    as_loader,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    lm_loss,
    sgd,
    trainer,
    weights,
)

BATCHES = lm_batches(4)


class TinyLM(nets.TinyLM):
    """Takes the ids alone, as its teachers here do."""

    def forward(self, ids):
        return super().forward(ids)


class Wide(TinyLM):
    """A teacher of another width than its student."""

    def build(self):
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.embed, self.head = nn.Embedding(VOCAB, 2 * DIM), nn.Linear(2 * DIM, VOCAB)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2 * DIM, 2 * DIM), nn.Tanh()) for _ in range(2)])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def perturbed(net, seed=5):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=g))
    return net


def a_teacher(kind=TinyLM, dropout=0.5):
    return perturbed(kind(dropout=dropout))


def divergence(logits, theirs, mask, temperature=2.0):
    q, p = F.log_softmax(logits.float() / temperature, -1), F.softmax(theirs.float() / temperature, -1)
    return temperature**2 * F.kl_div(q[mask], p[mask], reduction="batchmean")


def by_hand(student, teacher, batches, alpha=0.5, temperature=2.0, extra=None, optimizer=None):
    """Run the same training as a naive loop."""
    teacher = copy.deepcopy(teacher).eval()
    optimizer = optimizer or student.configure_optimizers()
    for batch in batches:
        logits = student(batch["input_ids"])
        with torch.no_grad():
            theirs = teacher(batch["input_ids"])
        kl = divergence(logits, theirs, batch["labels"] != -100, temperature)
        loss = (1 - alpha) * lm_loss(logits, batch) + alpha * kl
        if extra is not None:
            loss = loss + extra(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student


OTHERS = {
    "logits": (lambda: [], {}),
    "head": (lambda: [], {"head": "head"}),
    "teacher's head alone": (lambda: [], {"teacher_head": "head"}),
    "fused": (lambda: [ft.FusedLossHead("head")], {"head": "head"}),
    "fused, its head not named": (lambda: [ft.FusedLossHead("head")], {"teacher_head": "head"}),
    "fused, teacher's logits made": (lambda: [ft.FusedLossHead("head")], {}),
    "checkpointed": (lambda: [ft.ActivationCheckpointing()], {"head": "head"}),
    "compiled": (lambda: [ft.CompileBlocks(backend="aot_eager")], {"head": "head"}),
    "in backward": (lambda: [ft.OptimizerInBackward(), ft.FusedLossHead("head")], {"head": "head"}),
    "micro": (lambda: [ft.MicroBatching(3), ft.FusedLossHead("head")], {"head": "head"}),
    "micro, logits": (lambda: [ft.MicroBatching(3), ft.ActivationCheckpointing()], {}),
    "offload": (lambda: [ft.ActivationOffload(min_mib=0, folder=tempfile.gettempdir())], {"head": "head"}),
}


@functools.cache
def ends():
    """Return the weights with the teacher, by hand, and without."""
    return weights(by_hand(TinyLM(), a_teacher(), BATCHES)), weights(fit(TinyLM(), BATCHES))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_training_in_a_trainer_matches_the_loop_by_hand(name, turned):
    torch._dynamo.reset()
    others, settings = OTHERS[name]
    techniques = [Distillation(a_teacher(), **settings), *others()]
    module = fit(TinyLM(), BATCHES, techniques[::-1] if turned else techniques)
    expected, plain = ends()
    assert largest_difference(expected, weights(module)) <= 1e-5
    assert largest_difference(plain, weights(module)) > 1e-3


@pytest.mark.parametrize(("alpha", "temperature"), [(1.0, 1.0), (0.2, 5.0)])
def test_a_teacher_may_have_another_width_shape_and_dtype(alpha, temperature):
    teacher = a_teacher(Wide)
    expected = by_hand(TinyLM(), teacher, BATCHES, alpha, temperature)
    module = fit(TinyLM(), BATCHES, [Distillation(teacher, alpha=alpha, temperature=temperature, head="head")])
    assert largest_difference(weights(expected), weights(module)) <= 1e-5
    exact = fit(TinyLM(), BATCHES, [Distillation(teacher.double(), alpha=alpha, temperature=temperature)])
    assert largest_difference(weights(expected), weights(exact)) <= 1e-5


ADDED = torch.linspace(-2, 3, VOCAB)
FINISHED = {
    "a bias": lambda logits: logits + ADDED,
    "a factor, then a bias": lambda logits: 0.5 * logits + ADDED,
    "a bias, then a factor": lambda logits: (logits + ADDED) * 3,
    "a bias, then a cap": lambda logits: torch.tanh((logits + ADDED) / 4) * 4,
}


class Finished(TinyLM):
    """Changes its head's output, like Hugging Face's models with a ``final_logits_bias``."""

    def __init__(self, finish, **settings):
        super().__init__(**settings)
        self.finish = finish

    def forward(self, ids):
        return self.finish(super().forward(ids))


@pytest.mark.parametrize("finish", FINISHED.values(), ids=FINISHED)
@pytest.mark.parametrize("others", ["logits", "fused", "teacher's head alone", "head"])
def test_changes_of_the_logits_after_the_head_are_included(others, finish):
    teacher = perturbed(Finished(finish, dropout=0.5))
    expected = by_hand(Finished(finish), teacher, BATCHES)
    techniques, settings = OTHERS[others]
    module = fit(Finished(finish), BATCHES, [Distillation(teacher, **settings), *techniques()])
    assert largest_difference(weights(expected), weights(module)) <= 1e-5


def test_with_alpha_0_the_training_is_the_plain_one_and_the_distance_is_logged():
    module = TinyLM()
    t = trainer([Distillation(a_teacher(), alpha=0.0, head="head")])
    t.fit(module, as_loader(BATCHES))
    assert largest_difference(ends()[1], weights(module)) == 0
    assert t.callback_metrics["distillation/kl"] > 0


def test_the_student_approaches_its_teacher():
    teacher, student, ids = a_teacher(dropout=0.0), TinyLM(), BATCHES[0]["input_ids"]
    everything = torch.ones_like(ids, dtype=torch.bool)
    before = divergence(student(ids), teacher(ids), everything).item()
    fit(student, BATCHES * 20, [Distillation(teacher, alpha=1.0)])
    assert divergence(student(ids), teacher(ids), everything).item() < 0.2 * before


# --- micro-batches, accumulation, loops ---


def test_micro_batches_in_a_trainer_change_nothing_and_log_the_same():
    logged, ends = [], []
    for others in ([], [ft.MicroBatching(3)]):
        t = trainer([Distillation(a_teacher(), features={"blocks.0": "blocks.2"}), *others])
        t.fit(module := TinyLM(), as_loader(BATCHES))
        ends.append(weights(module))
        logged.append({key: float(t.callback_metrics[f"distillation/{key}"]) for key in ("own", "kl", "features")})
    assert largest_difference(*ends) <= 1e-5
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)


@pytest.mark.parametrize("others", [lambda: [], lambda: [ft.FusedLossHead("head")]], ids=["logits", "fused"])
def test_a_micro_batch_without_targets_has_no_weight(others):
    batches = lm_batches(2)
    batches[0]["labels"][:2] = -100
    ends = []
    for micro in ([], [ft.MicroBatching(3)]):
        distillation = Distillation(a_teacher(), head="head", features={"blocks.0": "blocks.2"})
        ends.append(weights(fit(TinyLM(), batches, [distillation, *others(), *micro])))
    assert largest_difference(*ends) <= 1e-5


def test_accumulation_windows_match_the_loop_by_hand():
    from tests.cases import pairs_of

    teacher = a_teacher()
    expected = by_hand(TinyLM(), teacher, pairs_of(BATCHES))
    module = fit(TinyLM(), BATCHES, [Distillation(teacher), ft.TokenWeightedAccumulation(2)])
    assert largest_difference(weights(expected), weights(module)) <= 1e-5


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("way", ["with", "apply", "fabric"])
def test_bare_loops_and_fabric_match_the_loop_by_hand(n, way):
    teacher, model = a_teacher(), TinyLM()
    expected = by_hand(TinyLM(), teacher, BATCHES)
    step, backward, optimizer = model.loss, torch.Tensor.backward, None
    if way == "fabric":
        fabric = L.Fabric(accelerator="cpu", devices=1)
        undo = ft.apply(model, [technique := Distillation(teacher, head="head"), ft.FusedLossHead("head")])
        wrapped, optimizer = fabric.setup_module(model), fabric.setup_optimizers(model.configure_optimizers())
        step, backward = (lambda batch: lm_loss(wrapped(batch["input_ids"]), batch)), fabric.backward
        distil = technique.distil
    elif way == "apply":
        undo = ft.apply(model, [technique := Distillation(teacher)])
        distil = technique.distil
    else:
        undo = distil_into(model, teacher)
        distil = undo.__enter__()
    optimizer, step = optimizer or model.configure_optimizers(), distil(step)
    for batch in BATCHES:
        optimizer.zero_grad()
        ft.accumulate_gradients(step, batch, n, backward=backward)
        optimizer.step()
    undo.__exit__(None, None, None)
    assert largest_difference(weights(expected), weights(model)) <= 1e-5
    assert not any("forward" in vars(m) for net in (model, teacher) for m in net.modules()) or way == "fabric"


def test_without_gradients_the_teacher_is_not_run():
    teacher, model = a_teacher(), TinyLM()
    asked = count_calls(teacher)
    with distil_into(model, teacher) as distil:
        step = distil(model.loss)
        with torch.no_grad():
            assert step(BATCHES[0]) == model.loss(BATCHES[0])
        model.loss(BATCHES[0])  # nor outside of a step
        assert len(asked) == 0
        step(BATCHES[0])
        assert len(asked) == 1


def count_calls(module):
    calls = []
    module.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


def test_validation_skips_the_teacher_and_checkpointing_runs_it_once():
    teacher = a_teacher()
    asked = count_calls(teacher)
    t = trainer([Distillation(teacher), ft.ActivationCheckpointing()], num_sanity_val_steps=1)
    t.fit(module := TinyLM(), as_loader(BATCHES), as_loader(BATCHES))
    assert asked == [False] * len(BATCHES)
    t.validate(module, as_loader(BATCHES), verbose=False)
    assert len(asked) == len(BATCHES)
    trainer([Distillation(pytest.fail)]).validate(module, as_loader(BATCHES), verbose=False)  # nor is it made


# --- Hugging Face ---


def llama(hidden=16, vocab=97, seed=0, **settings):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**MODELS["llama"][1], "vocab_size": vocab, "hidden_size": hidden, **settings})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def hf_by_hand(model, teacher, batches, rows=slice(None)):
    optimizer = sgd(model.parameters(), lr=0.1)
    for batch in batches:
        out = model(**batch)
        with torch.no_grad():
            theirs = teacher(input_ids=batch["input_ids"]).logits
        counted = batch["labels"][:, 1:] != -100
        loss = 0.5 * out.loss + 0.5 * divergence(out.logits[:, :-1], theirs[:, :-1], counted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "others",
    [
        lambda: [],
        lambda: [ft.FusedLossHead()],
        lambda: [ft.MicroBatching(3, count=ft.micro_batching.count_next_tokens)],
        lambda: [
            ft.FusedLossHead(),
            ft.MicroBatching(2, count=ft.micro_batching.count_next_tokens),
            ft.ActivationCheckpointing(),
        ],
    ],
    ids=["alone", "FusedLossHead", "MicroBatching", "all"],
)
def test_hugging_face_models_train_in_a_trainer(others):
    batches, teacher = [hf_batch(4), hf_batch(3)], llama(24, seed=1, num_hidden_layers=3)
    module = HuggingFace(llama())
    trainer([Distillation(teacher), *others()]).fit(module, as_loader(batches), as_loader(batches))
    expected = hf_by_hand(llama(), teacher, batches)
    assert largest_difference(weights(expected), weights(module.model)) <= 1e-5
    assert len(module.accuracy) == 4


def built(name, seed):
    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    auto = {"T5Config": AutoModelForSeq2SeqLM, "BertConfig": AutoModelForMaskedLM}.get(kind, AutoModelForCausalLM)
    model = auto.from_config(config).eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_compared_logits_are_the_models_own(name, fused):
    model, plain, teacher = built(name, 1), built(name, 1), built(name, 2)
    batch = hf_batch()
    shifted = model.can_generate() and not model.config.is_encoder_decoder
    kept = slice(None, -1) if shifted else slice(None)
    out, theirs = plain(**batch), teacher(**batch).logits.detach()
    mask = batch["labels"][:, 1:] != -100 if shifted else batch["labels"] != -100
    expected = 0.5 * out.loss + 0.5 * divergence(out.logits[:, kept], theirs[:, kept], mask)
    expected.backward()
    if fused:
        fuse_loss_head_(model)
    with distil_into(model, teacher) as distil:
        seen = distil(lambda batch: model(**batch))(batch)
    seen.loss.backward()
    torch.testing.assert_close(seen["loss"], expected, rtol=1e-5, atol=1e-6)
    assert largest_difference(gradients(plain), gradients(model)) <= 2e-5


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_a_peft_student_learns_from_a_directory(tmp_path):
    peft = pytest.importorskip("peft")
    teacher = llama(24, seed=1)
    teacher.save_pretrained(tmp_path)
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    nets = []
    for _ in range(2):
        student = llama()
        torch.manual_seed(1)
        nets.append(peft.get_peft_model(student, config))
    module = HuggingFace(nets[0])
    trainer([Distillation(tmp_path), ft.FusedLossHead()]).fit(module, as_loader([hf_batch()]))
    expected = hf_by_hand(nets[1], teacher, [hf_batch()])
    assert largest_difference(weights(expected), weights(module.model)) <= 1e-5


def test_a_directory_may_hold_another_architecture_of_the_same_task(tmp_path):
    built("qwen3", 2).save_pretrained(tmp_path)
    student = llama()
    with distil_into(student, str(tmp_path)) as distil:
        assert type(distil.teacher.module).__name__ == "Qwen3ForCausalLM"
        distil(lambda batch: student(**batch))(hf_batch()).loss.backward()
    built("bert, masked", 2).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="no Hugging Face task supports both that class and a T5Config"):
        built("t5, nothing shifted", 2).save_pretrained(tmp_path / "t5")
        Distillation(tmp_path / "t5").distil_(student)


def test_a_pickle_is_not_opened(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="contains no safetensors file, and pickles are not opened"):
        Distillation(tmp_path).distil_(llama())
    with pytest.raises(ValueError, match="no such directory"):
        Distillation("organisation/model").distil_(llama())


def test_peak_memory_contains_neither_logits():
    def added(**settings):
        model, teacher = llama(vocab=8192, max_position_embeddings=512), llama(24, vocab=8192, seed=1)
        if settings.pop("fused"):
            fuse_loss_head_(model)
        ids = torch.randint(8192, (4, 512), generator=torch.Generator().manual_seed(0))
        with distil_into(model, teacher, alpha=0.5, **settings) as distil:
            step = distil(lambda ids: model(input_ids=ids, labels=ids).loss)
            step(ids).backward()
            model.zero_grad()
            with PeakMemory("cpu", model, teacher, ids) as peak:
                step(ids).backward()
        return peak.added_bytes

    logits = 4 * 512 * 8192 * 4
    assert added(fused=True) < 0.6 * logits
    naive = added(fused=False)
    assert naive > 2 * logits  # the student's own loss computes them


# --- counted positions ---


def test_masks_come_from_attention_masks_or_a_function():
    model, teacher, batch = llama(), llama(24, seed=1), hf_batch()
    ids, attended = batch["input_ids"], torch.ones_like(batch["input_ids"])
    attended[0, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": attended}
    logits, theirs = (net(**inputs).logits.detach() for net in (model, teacher))
    odd = torch.arange(ids.numel()).view_as(ids) % 2 == 1
    for mask, counted in ((None, attended == 1), (lambda batch: odd, odd)):
        with distil_into(model, teacher, alpha=1.0, mask=mask) as distil:
            seen = distil(lambda batch: model(**batch).logits.sum())(inputs)
        torch.testing.assert_close(seen.detach(), divergence(logits, theirs, counted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])},
        (torch.zeros(4, 8), torch.tensor([0, 1, 1, -100])),
        [{"x": torch.zeros(3)}, {"targets": torch.tensor([1, -100, 1])}],
        {"inner": {"labels": torch.tensor([1, 1])}, "x": torch.zeros(2)},
        {"input_ids": torch.tensor([[1, 2]])},
        (torch.zeros(4, 8), torch.zeros(4)),
    ],
)
def test_labels_are_found_as_by_count_targets(batch):
    labels = find_labels(batch)[1]
    counted = ft.micro_batching.count_targets(batch)
    assert isinstance(counted, int) if labels is None else (labels != -100).sum() == counted


def test_classes_on_the_second_axis_and_samples_without_labels():
    images, labels = torch.randn(2, 3, 5, 5), torch.randint(7, (2, 5, 5))
    labels[0, :2] = -100
    student, teacher = nn.Conv2d(3, 7, 1), nn.Conv2d(3, 7, 3, padding=1)
    with distil_into(student, teacher, alpha=1.0) as distil:
        seen = distil(lambda batch: F.cross_entropy(student(batch[0]), batch[1]))((images, labels))
        by_sample = distil(lambda batch: student(batch).mean(dim=(2, 3)).sum())(images[..., :7])
    logits, theirs = (net(images).movedim(1, -1) for net in (student, teacher))
    torch.testing.assert_close(seen, divergence(logits, theirs, labels != -100))
    assert by_sample.isfinite()


def test_labels_that_do_not_fit_the_logits_are_ignored(caplog):
    student, teacher, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(2, 5, 4)
    with distil_into(student, teacher, alpha=1.0) as distil, caplog.at_level("INFO", "lightning_fasttrain"):
        seen = distil(lambda batch: student(batch["x"]).sum())({"x": x, "labels": torch.zeros(11, dtype=torch.long)})
    torch.testing.assert_close(seen, divergence(student(x), teacher(x), torch.ones(2, 5, dtype=torch.bool)))
    assert "(11,) do not fit logits (2, 5, 3)" in caplog.text


# --- features ---


def tapped(net, path, ids):
    kept = []
    handle = net.get_submodule(path).register_forward_hook(lambda m, i, out: kept.append(out))
    net(ids)
    handle.remove()
    return kept[0][0] if isinstance(kept[0], tuple) else kept[0]


def feature_loss(student, teacher, path, to, batch, projection=None):
    ours, mask = tapped(student, path, batch["input_ids"]), batch["labels"] != -100
    with torch.no_grad():
        theirs = tapped(teacher, to, batch["input_ids"])
    ours = ours if projection is None else projection(ours)
    return (ours - theirs)[mask].square().mean()


@pytest.mark.parametrize(
    "others",
    [
        lambda: [],
        lambda: [ft.ActivationCheckpointing()],
        lambda: [ft.CompileBlocks(backend="aot_eager")],
        lambda: [ft.MicroBatching(3), ft.FusedLossHead("head"), ft.ActivationCheckpointing()],
    ],
    ids=["alone", "checkpointed", "compiled", "all"],
)
def test_features_of_equal_width(others):
    torch._dynamo.reset()
    teacher, features = a_teacher(), {"blocks.0": "blocks.1", "embed": "embed"}
    student, still = TinyLM(), copy.deepcopy(teacher).eval()

    def extra(batch):
        return 0.3 * sum(feature_loss(student, still, ours, to, batch) for ours, to in features.items())

    expected = by_hand(student, teacher, BATCHES, extra=extra)
    techniques = [Distillation(teacher, head="head", features=features, feature_weight=0.3), *others()]
    module = fit(TinyLM(), BATCHES, techniques)
    assert largest_difference(weights(expected), weights(module)) <= 1e-5


def test_the_heads_output_can_be_a_feature():
    teacher, student = a_teacher(), TinyLM()
    still = copy.deepcopy(teacher).eval()
    expected = by_hand(
        student, teacher, BATCHES, extra=lambda batch: feature_loss(student, still, "head", "head", batch)
    )
    module = fit(TinyLM(), BATCHES, [Distillation(teacher, features={"head": "head"})])
    assert largest_difference(weights(expected), weights(module)) <= 1e-5


PROJECTED = "distillation_projections.blocks/0"


def test_features_of_another_width_use_a_trained_projection():
    teacher, projection = a_teacher(Wide), nn.Linear(DIM, 2 * DIM)
    student, still, learnt = TinyLM(), copy.deepcopy(teacher).eval(), copy.deepcopy(projection)
    optimizer = torch.optim.AdamW([*student.parameters(), *learnt.parameters()], lr=0.01)
    extra = partial(feature_loss, student, still, "blocks.0", "blocks.1", projection=learnt)
    by_hand(student, teacher, BATCHES, extra=lambda batch: extra(batch=batch), optimizer=optimizer)
    technique = Distillation(teacher, features={"blocks.0": ("blocks.1", projection)})
    module = fit(TinyLM(), BATCHES, [technique])
    seen = weights(module)
    assert largest_difference(weights(learnt), {k: seen.pop(f"{PROJECTED}.{k}") for k in ("weight", "bias")}) <= 1e-5
    assert largest_difference(weights(student), seen) <= 1e-5
    again = fit(TinyLM(), BATCHES, [technique])  # the given module is not trained
    assert largest_difference(weights(module), weights(again)) == 0


def test_features_alone_need_no_logits():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return {"hidden": self.layer(x)}

    torch.manual_seed(0)
    student, teacher, x = Encoder(), Encoder(), torch.randn(3, 4)
    with distil_into(student, teacher, alpha=0.0, features={"layer": "layer"}) as distil:
        loss = distil(lambda x: student(x)["hidden"].sum())(x)
    expected = student.layer(x).sum() + (student.layer(x) - teacher.layer(x)).square().mean()
    torch.testing.assert_close(loss, expected)


def test_a_checkpoint_with_projections_resumes_and_validates(tmp_path):
    def technique():
        torch.manual_seed(4)
        return Distillation(a_teacher(Wide), features={"blocks.0": ("blocks.1", nn.Linear(DIM, 2 * DIM))})

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole = fit(TinyLM(dropout=0.1), BATCHES, [technique(), Save()], max_epochs=2)
    resumed, t = TinyLM(dropout=0.1), trainer([technique()], max_epochs=2)
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert [key for key in state if key not in TinyLM().state_dict()] == [f"{PROJECTED}.weight", f"{PROJECTED}.bias"]
    torch.manual_seed(11)
    t.fit(resumed, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert f"{PROJECTED}.weight" in dict(resumed.named_parameters())
    assert float(t.callback_metrics["distillation/features"]) > 0
    fresh = trainer([technique()])
    fresh.validate(TinyLM(), as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", verbose=False, weights_only=True)
    assert set(weights(whole)) == set(weights(resumed))


# --- teacher, student and run afterwards ---


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def technique():
        features = {"blocks.0": ("blocks.1", nn.Linear(DIM, 2 * DIM))}
        return Distillation(lambda: a_teacher(Wide), head="head", features=features)

    whole = fit(TinyLM(), BATCHES, [technique(), Save()], max_epochs=2)
    resumed = TinyLM()
    trainer([technique()], max_epochs=2).fit(
        resumed, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert largest_difference(weights(whole), weights(resumed)) == 0


def test_the_teacher_is_restored_and_not_part_of_the_run(tmp_path):
    teacher = a_teacher().train()
    teacher.blocks[0].eval()
    before, modes = weights(teacher), [m.training for m in teacher.modules()]

    class Look(L.Callback):
        def on_train_batch_end(self, t, module, *args):
            held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
            theirs = {id(p) for p in teacher.parameters()}
            assert not theirs & {id(p) for p in (*held, *module.parameters())}
            assert not any(m.training for m in teacher.modules())
            self.keys = list(module.state_dict())

    t = trainer([Distillation(teacher, head="head"), look := Look()])
    t.fit(module := TinyLM(), as_loader(BATCHES))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == look.keys == list(TinyLM().state_dict())
    assert largest_difference(before, weights(teacher)) == 0
    assert [m.training for m in teacher.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters())
    assert not any("forward" in vars(m) for net in (module, teacher) for m in net.modules())
    assert "training_step" not in vars(module)


def test_changes_are_undone_when_the_run_fails():
    class Fails(TinyLM):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise ArithmeticError

    teacher, module = a_teacher(), Fails()
    with pytest.raises(ArithmeticError):
        fit(module, BATCHES, [Distillation(teacher, head="head")])
    assert not any("forward" in vars(m) for net in (module, teacher) for m in net.modules())
    assert "training_step" not in vars(module)


def test_a_second_fit_with_the_same_technique_equals_the_first():
    technique = Distillation(a_teacher(), head="head")
    first, second = (fit(TinyLM(), BATCHES, [technique]) for _ in range(2))
    assert largest_difference(weights(first), weights(second)) == 0


def test_a_teacher_function_does_not_change_the_random_state():
    def make():
        torch.randn(100)
        return a_teacher()

    given = fit(TinyLM(dropout=0.3), BATCHES, [Distillation(a_teacher())])
    made = fit(TinyLM(dropout=0.3), BATCHES, [Distillation(make)])
    assert largest_difference(weights(given), weights(made)) == 0


def test_from_a_lightning_module_teacher_the_same_submodule_is_used():
    student, teacher = HuggingFace(llama()), HuggingFace(llama(24, seed=1))
    trainer([Distillation(teacher)]).fit(student, as_loader([hf_batch()]))
    expected = hf_by_hand(llama(), teacher.model, [hf_batch()])
    assert largest_difference(weights(expected), weights(student.model)) <= 1e-5
    named = HuggingFace(llama())
    trainer([Distillation(teacher, student="model")]).fit(named, as_loader([hf_batch()]))
    assert largest_difference(weights(student), weights(named)) == 0


def test_a_copy_of_the_model_trains_itself_beside_the_same_teacher():
    teacher, model = a_teacher(), TinyLM()
    with distil_into(model, teacher, head="head", features={"blocks.0": "blocks.0"}) as distil:
        model.step = distil(model.loss)
        model.step(BATCHES[0])
        twin = copy.deepcopy(model)
        loss = twin.step(BATCHES[1])
        loss.backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(loss, model.step(BATCHES[1]), rtol=0, atol=0)
        assert twin.step.distiller.teacher.module is teacher


def test_a_copy_within_a_run_trains_itself():
    class Copy(L.Callback):
        def on_train_batch_end(self, t, module, outputs, batch, batch_idx):
            self.twin = copy.deepcopy(module)
            with pytest.warns(UserWarning, match="self.log"):
                self.twin.training_step(batch, batch_idx).backward()
            assert all(p.grad is not None for p in self.twin.parameters())

    copied = fit(TinyLM(), BATCHES, [Distillation(a_teacher(), head="head"), Copy()])
    plain = fit(TinyLM(), BATCHES, [Distillation(a_teacher(), head="head")])
    assert largest_difference(weights(plain), weights(copied)) == 0


def test_a_step_keeps_no_tensors_alive():
    teacher, model = a_teacher(), TinyLM()
    with distil_into(model, teacher, head="head", features={"blocks.0": "blocks.0"}) as distil:
        held = []

        def step(batch):
            logits = model(batch["input_ids"])
            held.append(weakref.ref(logits))
            return lm_loss(logits, batch)

        distil(step)(BATCHES[0]).backward()
        gc.collect()
        assert held[0]() is None


def test_a_steps_output_is_unchanged_except_for_its_loss():
    teacher, model = a_teacher(), TinyLM()
    with distil_into(model, teacher) as distil:
        alone = distil(model.loss)(BATCHES[0])
        given = {"loss": model.loss(BATCHES[0]), "n": 3}

        def step(batch):
            given["loss"] = model.loss(batch)
            return given

        seen = distil(step)(BATCHES[0])
        assert seen["n"] == 3
        assert seen["loss"] == alone != given["loss"]
        assert distil(lambda batch: None)(BATCHES[0]) is None
        assert distil.parts["own"] == given["loss"].detach()


def test_a_teacher_that_uses_its_logits_computes_them_with_a_log_line(caplog):
    class Sharp(Wide):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits - logits.mean(-1, keepdim=True)

    teacher = a_teacher(Sharp)
    expected = by_hand(TinyLM(), teacher, BATCHES)
    with caplog.at_level("INFO", "lightning_fasttrain"):
        module = fit(TinyLM(), BATCHES, [Distillation(teacher, head="head")])
    assert largest_difference(weights(expected), weights(module)) <= 1e-5
    assert "Sharp uses its logits, so the teacher computes them" in caplog.text


def test_if_a_model_returns_only_its_loss_the_heads_output_is_used():
    class LossOnly(TinyLM):
        def forward(self, ids, labels):
            return lm_loss(super().forward(ids), {"labels": labels})

        def loss(self, batch):
            return self(batch["input_ids"], batch["labels"])

    teacher = perturbed(LossOnly())
    plain = perturbed(TinyLM())
    expected = by_hand(TinyLM(), plain, BATCHES)
    for others in ([], [ft.FusedLossHead("head")]):
        module = fit(LossOnly(), BATCHES, [Distillation(teacher, head="head"), *others])
        assert largest_difference(weights(expected), weights(module)) <= 1e-5


def test_distillation_works_in_bfloat16_autocast():
    teacher = a_teacher()
    exact = by_hand(TinyLM(), teacher, BATCHES)
    for others in ([], [ft.FusedLossHead("head")]):
        module = fit(TinyLM(), BATCHES, [Distillation(teacher, head="head"), *others], precision="bf16-mixed")
        assert 0 < largest_difference(weights(exact), weights(module)) <= 3e-2


def test_autocast_may_be_inside_the_step_alone():
    teacher, ends = a_teacher(), []
    for fused in (False, True):
        model = TinyLM()
        if fused:
            fuse_loss_head_(model, "head")
        with distil_into(model, teacher, head="head") as distil:
            step = distil(torch.autocast("cpu", torch.bfloat16, cache_enabled=False)(model.loss))
            step(BATCHES[0]).backward()
        ends.append(gradients(model))
    model = TinyLM()
    model.loss(BATCHES[0])
    assert largest_difference(*ends) <= 2e-2


# --- bad input ---


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"alpha": 1.5}, ValueError, r"alpha=1.5\): it must be between 0 and 1"),
        ({"alpha": -0.1}, ValueError, "alpha=-0.1"),
        ({"temperature": 0}, ValueError, r"temperature=0\): it must be greater than 0"),
        ({"feature_weight": -1.0}, ValueError, "feature_weight=-1.0"),
        ({"features": ["blocks.0"]}, TypeError, "expected a dict or None, got a list"),
        ({"features": {"blocks.0": 3}}, TypeError, "entry 0: expected a string or 2 values, got a whole number"),
        ({"features": {"blocks.0": ("blocks.1", 16)}}, TypeError, "entry 1: expected a Module, got a whole number"),
        ({"features": {"blocks.0": ("blocks.1", None)}}, TypeError, "entry 1: expected a Module, got None"),
        ({"mask": torch.ones(3)}, TypeError, "expected a function or None, got a Tensor"),
        ({"teacher": 3}, TypeError, r"teacher=3\): expected a Module, a string, a path or a function"),
    ],
)
def test_invalid_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Distillation(**{"teacher": TinyLM(), **settings})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"student": "block.0"}, ValueError, "student='block.0' in TinyLM: no such module.*'blocks.0'"),
        ({"head": "heat"}, ValueError, "head='heat'.*Similar names are 'head'"),
        ({"teacher_head": "lm_head"}, ValueError, "teacher_head='lm_head'.*'head'"),
        ({"features": {"block.1": "blocks.1"}}, ValueError, "features='block.1'.*'blocks.1'"),
        ({"features": {"blocks.1": "layers.1"}}, ValueError, "features='layers.1' in TinyLM"),
        ({"teacher": lambda: None}, TypeError, "the function for the teacher returned NoneType"),
    ],
)
def test_unknown_names_are_refused_with_similar_ones(settings, error, message):
    model, teacher = TinyLM(), a_teacher()
    with pytest.raises(error, match=message):
        ft.apply(model, [Distillation(**{"teacher": teacher, **settings})])
    assert not any("forward" in vars(m) for net in (model, teacher) for m in net.modules())
    assert all(m.training for m in teacher.modules())


def test_a_teacher_that_is_the_student_or_part_of_its_module_is_refused():
    model = TinyLM()
    with pytest.raises(ValueError, match="part of the model: they share 'embed.weight'.*copy.deepcopy"):
        ft.apply(model, [Distillation(model)])
    model.teacher = perturbed(TinyLM()).requires_grad_(False)
    with pytest.raises(ValueError, match="is part of the model.*Pass it to Distillation only"):
        ft.apply(model, [Distillation(model.teacher)])


def test_vocabularies_that_differ_are_refused_before_training_or_at_the_first_step():
    teacher = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, 9))
    with pytest.raises(ValueError, match="the student has 17 classes, the teacher 9.*resize_token_embeddings"):
        fit(TinyLM(), BATCHES, [Distillation(teacher, head="head", teacher_head="1")])
    with pytest.raises(ValueError, match="the student has 17 classes, the teacher 9"):
        fit(TinyLM(), BATCHES, [Distillation(teacher)])


def test_features_that_differ_in_width_are_refused_with_the_code_to_write():
    with pytest.raises(ValueError, match=r"{'blocks.0': \('blocks.1', nn.Linear\(8, 16\)\)}"):
        fit(TinyLM(), BATCHES, [Distillation(a_teacher(Wide), features={"blocks.0": "blocks.1"})])


def test_a_projection_does_not_become_a_layer_of_a_sequential():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    technique = Distillation(nn.Linear(4, 3), features={"0": ("", nn.Linear(4, 3))})
    with pytest.raises(ValueError, match="become one of its layers.*in a module of your own"):
        ft.apply(net, [technique])


def test_a_student_that_is_not_called_once_is_refused():
    class Idle(TinyLM):
        def training_step(self, batch, batch_idx):
            return sum(self(batch["input_ids"]).sum() for _ in range(self.times)) + self.embed.weight.sum()

    for times in (0, 2):
        module = Idle()
        module.times = times
        with pytest.raises(RuntimeError, match=f"the step called Idle {times} times.*Use student= to name"):
            fit(module, BATCHES, [Distillation(a_teacher())])


def test_missing_logits_and_missing_losses_are_refused():
    class Nothing(TinyLM):
        def training_step(self, batch, batch_idx):
            return {"loss": None, "x": self(batch["input_ids"])}

    with pytest.raises(TypeError, match="holds no loss tensor"):
        with distil_into(model := Nothing(), a_teacher()) as distil:
            distil(model.training_step)(BATCHES[0], 0)

    class Bag(nn.Module):
        def forward(self, ids):
            return {"features": ids}

    with pytest.raises(TypeError, match="Bag, the teacher, returned no logits.*alpha=0 and features="):
        fit(TinyLM(), BATCHES, [Distillation(Bag())])


def test_several_models_and_manual_optimization_are_refused():
    class Two(TinyLM):
        def __init__(self):
            super().__init__()
            self.a, self.b = llama(), llama()

    with pytest.raises(ValueError, match="several models: 'a', 'b'.*student="):
        ft.apply(Two(), [Distillation(a_teacher())])
    module = TinyLM()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"automatic_optimization=False.*distil\(step\) inside your training_step"):
        fit(module, BATCHES, [Distillation(a_teacher())])


def test_a_second_distillation_of_one_model_is_refused():
    model = TinyLM()
    with distil_into(model, a_teacher()):
        with pytest.raises(ValueError, match="TinyLM has a teacher"):
            with distil_into(model, a_teacher()):
                pass
    with pytest.raises(RuntimeError, match="no model has been given yet"):
        Distillation(a_teacher()).distil(model.loss)


def test_the_student_module_is_found():
    module = HuggingFace(llama())
    assert student_of(module, None) is module.model
    only = TinyLM(lazy=True)
    only.net, only.metric = nn.Linear(4, 4), nn.Dropout()
    assert student_of(only, None) is only.net
    assert student_of(several := TinyLM(), None) is several
    assert student_of(several, "blocks.0") is several.blocks[0]


def test_the_teachers_head_computes_no_logits():
    teacher, model, made = a_teacher(), TinyLM(), []
    with distil_into(model, teacher, head="head") as distil:
        teacher.register_forward_hook(lambda module, args, output: made.append(output))
        distil(model.loss)(BATCHES[0])
        teacher(BATCHES[0]["input_ids"])  # but it does for other callers
    assert isinstance(made[0], DeferredLogits)
    assert isinstance(made[1], torch.Tensor)


@pytest.mark.gpu
def test_on_cuda_the_teacher_follows_the_student_and_returns():
    teacher = a_teacher()
    expected = by_hand(TinyLM(), teacher, BATCHES)
    module = fit(TinyLM(), BATCHES, [Distillation(teacher, head="head"), ft.FusedLossHead("head")], accelerator="gpu")
    assert largest_difference(weights(expected), weights(module)) <= 1e-4
    assert {p.device.type for p in teacher.parameters()} == {"cpu"}


@pytest.mark.filterwarnings("ignore:FusedLossHead did nothing")
@pytest.mark.parametrize("fused", [False, True])
def test_logits_that_are_modified_in_place_are_compared_as_they_are(fused):
    class Masking(TinyLM):
        def forward(self, ids):
            logits = super().forward(ids)
            logits[..., 5:] = -9.0
            return logits

    teacher = perturbed(Masking())
    expected = by_hand(Masking(), teacher, BATCHES)
    techniques = [Distillation(teacher, head="head"), *([ft.FusedLossHead("head")] if fused else [])]
    module = fit(Masking(), BATCHES, techniques)
    assert largest_difference(weights(expected), weights(module)) <= 1e-5
    assert largest_difference(weights(Masking()), weights(module)) > 1e-3
