"""The weights of micro-batches are found from the loss itself, or the loss is refused with the tried rules."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.micro_batching.normalizer.count_targets import CountRule
from tests.support.nets import (
    DIM,
    VOCAB,
    Gradients,
    TinyLM,
    as_loader,
    concatenate,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    sgd,
    trainer,
)

PADDED = lm_batches(1, size=9, length=6)[0]
FULL = {name: torch.randint(1, VOCAB, (9, 6), generator=torch.Generator().manual_seed(2)) for name in PADDED}
ZERO_PADDED = {**PADDED, "labels": PADDED["labels"].clamp(min=0)}


def test_a_named_rule_that_needs_labels_is_refused_without_them():
    net = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="no integer labels to count"):
        ft.micro_batching.find_count(lambda x: net(x).pow(2).mean(), torch.randn(6, 3), count="targets")


def language_model(shift=False, **settings):
    net = TinyLM()

    def step(batch):
        logits, labels = net(batch["input_ids"]), batch["labels"]
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)

    return net, step


def segmentation():
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, padding=1)
    masks = torch.randint(4, (9, 5, 5))
    masks[torch.rand(9, 5, 5) < torch.linspace(0, 0.9, 9)[:, None, None]] = 255
    return (
        net,
        lambda batch: F.cross_entropy(net(batch[0]), batch[1], ignore_index=255),
        (torch.randn(9, 3, 5, 5), masks),
    )


def speech():
    torch.manual_seed(0)
    net = nn.Linear(4, VOCAB)
    targets = torch.randint(1, VOCAB, (9, 3))
    lengths = torch.tensor([1, 2, 3, 3, 1, 2, 3, 1, 3])

    def step(batch):
        x, y, sizes = batch
        frames = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(net(x).log_softmax(-1).transpose(0, 1), y, frames, sizes)

    return net, step, (torch.randn(9, 8, 4), targets, lengths)


def denoising():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)

    def step(x):
        noise, time = torch.randn_like(x), torch.rand(len(x), 1)
        return F.mse_loss(net(x * time + noise), noise)

    return net, step, torch.randn(9, 4)


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.up(x)) * torch.rand(len(x), 1)


def test_draws_in_recomputed_blocks_are_those_of_the_forward(caplog):
    torch.manual_seed(0)
    blocks, batch = nn.ModuleList([NoisyBlock(), NoisyBlock()]), torch.randn(6, 4)

    def run(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def contrast(x):
        return F.cross_entropy(run(x) @ run(x).T, torch.arange(len(x)))

    with caplog.at_level(logging.INFO):
        assert ft.micro_batching.find_count(lambda x: run(x).square().mean(), batch).name == "samples"
    assert "the gradient matches the unsplit batch" in caplog.text
    with pytest.raises(ValueError, match="samples of a batch depend on one another"):
        ft.micro_batching.find_count(contrast, batch)


def summed_by_hand():
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    return net, lambda batch: net(batch).square().sum() / 32, torch.randn(9, 4)


def hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config)
    return net, lambda batch: net(**batch), PADDED


SPLITTABLE = {
    "mean over targets": lambda: (*language_model(), PADDED),
    "sum": lambda: (*language_model(reduction="sum"), PADDED),
    "next tokens": lambda: (*language_model(shift=True), PADDED),
    "another ignored label": lambda: (*language_model(ignore_index=0), ZERO_PADDED),
    "smoothed": lambda: (*language_model(label_smoothing=0.1), PADDED),
    "a sum over a constant": summed_by_hand,
    "segmentation": segmentation,
    "CTC": speech,
    "causal model of Hugging Face": hugging_face,
}


def whole(net, step, batch):
    net.zero_grad()
    loss = step(batch)
    (loss if isinstance(loss, torch.Tensor) else loss.loss).backward()
    expected = gradients(net)
    net.zero_grad()
    return expected


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", SPLITTABLE)
def test_micro_batches_add_up_without_a_given_count(name, n):
    net, step, batch = SPLITTABLE[name]()
    expected = whole(net, step, batch)
    ft.accumulate_gradients(step, batch, n)
    assert largest_difference(expected, gradients(net)) < 2e-6


def test_a_trial_draws_the_same_random_values_for_the_same_samples():
    _, step, batch = denoising()
    assert ft.micro_batching.find_count(step, batch) == CountRule("samples")


def contrastive():
    net, _ = language_model()

    def step(batch):
        z = F.normalize(net(batch["input_ids"]).mean(1), dim=-1)
        return F.cross_entropy(5 * z @ z.T, torch.arange(len(z)))

    return net, step, PADDED


def with_router():
    net, step = language_model()
    with_balance = lambda batch: step(batch) + 0.1 * net(batch["input_ids"]).softmax(-1).mean((0, 1)).square().sum()  # noqa: E731
    return net, with_balance, PADDED


def with_running_mean():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 1)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.5)
            return self.head(x - self.mean)

    torch.manual_seed(0)
    net = Centred()
    return net, lambda x: net(x).square().mean(), torch.randn(9, 4) + 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: (*language_model(weight=torch.linspace(0.1, 3, VOCAB)), PADDED),
            "class weights.*not a number of samples",
        ),
        (contrastive, "depend on one another.*through="),
        (with_router, "cannot split this loss exactly.*through="),
        (with_running_mean, "cannot split this loss exactly"),
    ],
    ids=["class weights", "contrastive", "router", "running mean"],
)
def test_a_loss_without_a_counting_rule_is_refused_without_side_effects(make, words):
    net, step, batch = make()
    buffers, state = [b.clone() for b in net.buffers()], torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        ft.micro_batching.find_count(step, batch)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_without_the_check_the_nearest_count_is_used_and_its_error_reported():
    net, step, batch = with_router()
    with pytest.warns(ft.FastTrainWarning, match=r"with an error of .*%, which changes the training"):
        ft.accumulate_gradients(step, batch, 3, check=False)
    assert all(p.grad is not None for p in net.parameters())


def test_class_weights_work_with_the_count_suggested_by_the_message():
    weight = torch.linspace(0.1, 3, VOCAB)
    net, step = language_model(weight=weight)
    expected = whole(net, step, PADDED)

    def count(batch):
        labels = batch["labels"]
        return weight[labels[labels != -100]].sum()

    ft.accumulate_gradients(step, PADDED, 3, count=count)
    assert largest_difference(expected, gradients(net)) < 2e-6


def test_a_given_count_is_checked():
    _, step = language_model()
    with pytest.raises(ValueError, match=r"count= does not split this loss"):
        ft.micro_batching.find_count(step, PADDED, count=len)
    assert ft.micro_batching.find_count(step, PADDED, count="targets") == CountRule("targets")


def test_ambiguous_rules_are_decided_by_the_arguments_of_cross_entropy():
    assert ft.micro_batching.find_count(language_model(shift=True)[1], FULL) == CountRule("next_tokens")
    assert ft.micro_batching.find_count(language_model(ignore_index=0)[1], FULL) == CountRule("targets", ignore_index=0)
    net = TinyLM()

    def hidden(batch):  # the same as next tokens, but no call of cross_entropy shows it
        logits = net(batch["input_ids"])[:, :-1].log_softmax(-1)
        return -logits.gather(-1, batch["labels"][:, 1:, None]).mean()

    assert ft.micro_batching.find_count(hidden, FULL) == CountRule("next_tokens")


def test_under_autocast_gradients_are_compared_in_float32():
    net, step = language_model(shift=True)
    in_bf16 = torch.autocast("cpu", torch.bfloat16)(step)
    assert ft.micro_batching.find_count(in_bf16, PADDED) == CountRule("next_tokens")
    with pytest.raises(ValueError, match="cannot split|does not split this loss"):
        ft.micro_batching.find_count(in_bf16, PADDED, count="targets")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpointed_blocks_run_without_dropout_in_both_passes(precision):
    net = TinyLM(dropout=0.3)
    step = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")(net.loss)
    with ft.apply(net, [ft.ActivationCheckpointing()]):
        with pytest.raises(ValueError, match="cannot split|does not split this loss"):
            ft.micro_batching.find_count(step, PADDED, count="samples")
        assert ft.micro_batching.find_count(step, PADDED) == CountRule("targets")


def test_the_rule_is_found_for_bfloat16_weights():
    net, step = language_model(reduction="sum")
    net.bfloat16()
    assert ft.micro_batching.find_count(step, PADDED) == CountRule("sum")


def long_texts_in_bfloat16():
    """Enough tokens that 16-bit gradients of biases are many percent off, even for the unsplit batch."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(vocabulary=256, context=256, layers=2, heads=4, width=96)).bfloat16()
    ids = torch.randint(256, (8, 257))
    return net, (ids[:, :-1], ids[:, 1:])


def test_the_rule_is_found_for_bfloat16_weights_on_long_texts():
    net, batch = long_texts_in_bfloat16()

    def step(part):
        return F.cross_entropy(net(part[0]).flatten(0, 1).float(), part[1].flatten())

    assert ft.micro_batching.find_count(step, batch).name == "targets"
    with pytest.raises(ValueError, match="cannot split|does not split this loss"):
        ft.micro_batching.find_count(step, batch, count="sum")


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_dependent_samples_are_detected_with_bfloat16_weights(share):
    net, batch = long_texts_in_bfloat16()

    def contrastive(part):
        logits = net(part[0]).float()
        x = F.normalize(logits.mean(1), dim=1)
        pairs = F.cross_entropy(x @ x.T / 0.1, torch.arange(len(x)))
        return share * pairs + (1 - share) * F.cross_entropy(logits.flatten(0, 1), part[1].flatten())

    with pytest.raises(ValueError, match="cannot split|does not split this loss"):
        ft.micro_batching.find_count(contrastive, batch)


@pytest.mark.parametrize(
    ("dtype", "autocast", "share"),
    [(torch.float32, False, 1e-3), (torch.float32, True, 0.03), (torch.bfloat16, False, 0.1)],
    ids=["float32", "autocast", "bfloat16"],
)
def test_a_weak_influence_of_other_samples_is_distinguished_from_rounding(dtype, autocast, share):
    """As that of the minibatch standard deviation in StyleGAN2's discriminator: 5% of the gradient, at 512 channels."""
    torch.manual_seed(0)
    first, last = nn.Linear(16, 32, dtype=dtype), nn.Linear(32, 10, dtype=dtype)
    x, y = torch.randn(16, 16, dtype=dtype), torch.randint(10, (16,))

    def step(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = first(batch[0]).tanh()
            return F.cross_entropy(last(hidden - share * hidden.mean(0)).float(), batch[1])

    with pytest.raises(ValueError, match="samples of a batch depend on one another"):
        ft.micro_batching.find_count(step, (x, y), 4)
    share = 0.0
    ft.micro_batching.find_count(step, (x, y), 4)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_its_cost_grows_no_faster_than_the_model():
    def operations(layers):
        net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
        with Operations() as seen:
            ft.micro_batching.find_count(lambda x: net(x).square().sum(), torch.ones(6, 3))
        return seen.count

    assert operations(48) - operations(32) == operations(32) - operations(16)


def test_float32_weights_among_bfloat16_ones_are_compared_to_float32_precision():
    torch.manual_seed(0)
    large, small = nn.Linear(64, 64).bfloat16(), nn.Parameter(torch.ones(64))

    def step(x):
        coupled = (small * x.mean(0)).square().mean()  # a coupling of all samples, in a small gradient
        return 10 + large(x.bfloat16()).float().square().mean() + 0.5 * coupled  # a loss that also hides it

    with pytest.raises(ValueError, match="cannot split|does not split this loss"):
        ft.micro_batching.find_count(step, torch.randn(8, 64) + 1)


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_the_rule_is_found_for_float32_adapters_on_a_low_precision_base(base):
    model = TinyLM().bfloat16()
    ft.apply(model, [ft.LoRA(rank=2)] if base == "bfloat16" else [ft.QLoRA(rank=2)])
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert ft.micro_batching.find_count(model.loss, PADDED) == CountRule("targets")
    with pytest.raises(ValueError, match="count= does not split this loss"):
        ft.micro_batching.find_count(model.loss, PADDED, count=lambda batch: len(batch["labels"]))


def test_the_normalizer_is_found_despite_batch_norm():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.warns(ft.FastTrainWarning, match="changes the training"):
        assert ft.micro_batching.find_count(
            lambda x: net(x).square().sum(), torch.randn(9, 4), check=False
        ) == CountRule("sum")
    with pytest.raises(ValueError, match="BatchNorm in training mode"):
        ft.micro_batching.find_count(lambda x: net(x).square().sum(), torch.randn(9, 4))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


def test_for_a_single_sample_the_rule_is_read_from_the_loss():
    one = {name: value[:1] for name, value in PADDED.items()}
    assert ft.micro_batching.find_count(language_model(shift=True)[1], one) == CountRule("next_tokens")
    net = nn.Linear(4, 1)
    assert ft.micro_batching.find_count(lambda x: net(x).square().mean(), torch.randn(1, 4)) == CountRule("samples")


def test_a_step_redefined_in_a_loop_is_searched_once():
    net, calls = TinyLM(), []

    def loss(batch):
        calls.append(len(batch["labels"]))
        return net.loss(batch)

    seen = []
    for _ in range(3):
        ft.accumulate_gradients(lambda part: loss(part), PADDED, 3)
        seen.append(len(calls))
        calls.clear()
    assert seen[0] > 3
    assert seen[1:] == [3, 3]
    other = TinyLM()
    net = other  # another model, so another training
    ft.accumulate_gradients(lambda part: loss(part), PADDED, 3)
    assert len(calls) > 3


@pytest.mark.parametrize("count", ["auto", "targets", lambda part: int((part["labels"] != -100).sum())])
def test_a_named_count_and_a_redecorated_step_are_searched_once(count):
    net, calls = TinyLM(), []

    def loss(batch):
        calls.append(len(batch["labels"]))
        return net.loss(batch)

    for _ in range(3):
        calls.clear()
        step = torch.autocast("cpu", torch.bfloat16)(loss)
        ft.accumulate_gradients(step, PADDED, 3, count=count)
    assert len(calls) == 3


def test_weakly_dependent_samples_are_detected_under_outer_autocast(caplog):
    class Coupled(TinyLM):
        def loss(self, batch):
            spread = self(batch["input_ids"]).softmax(-1).mean((0, 1)).square().sum()
            return super().loss(batch) + 0.05 * spread

    technique = ft.MicroBatching(3, through="no.such.layer")
    with pytest.raises(ValueError, match="matches nothing"):
        fit(Coupled(), [PADDED], [technique], precision="bf16-mixed")
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        fit(Coupled(), [PADDED], [ft.MicroBatching(3)], precision="bf16-mixed")
    assert "runs in micro-batches with recomputation" in caplog.text


@pytest.mark.parametrize("count", [3, "tokens", None])
def test_invalid_counts_are_refused(count):
    for make in (ft.MicroBatching, ft.TokenWeightedAccumulation):
        with pytest.raises((TypeError, ValueError), match="count="):
            make(2, count=count)


# In the Trainer.


class Shifted(TinyLM):
    """A language model that shifts its labels, logs, and records its batches."""

    def __init__(self, reduction="mean", **kwargs):
        super().__init__(optimizer=sgd, **kwargs)
        self.reduction, self.seen = reduction, []
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)

    def training_step(self, batch, batch_idx):
        logits, labels = self(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        self.accuracy(logits.flatten(0, 1), labels.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.seen.append(batch_idx)
        return loss


def run(callbacks, batches, **settings):
    torch.manual_seed(5)
    seen, module = Gradients(), Shifted(**settings)
    t = trainer([*callbacks, seen])
    t.fit(module, as_loader(batches))
    return seen.seen, module, t.callback_metrics, torch.rand(1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_the_trainer_the_search_has_no_side_effects(reduction):
    batches = lm_batches(3, size=6)
    expected, _, metrics, _ = run([], batches, reduction=reduction)
    seen, module, ours, random = run([ft.MicroBatching(3)], batches, reduction=reduction)
    assert max(map(largest_difference, expected, seen)) < 2e-6
    assert len(module.seen) == 9
    for name in ("loss", "accuracy"):
        assert float(ours[name]) == pytest.approx(float(metrics[name]), rel=1e-6)
    rule = "next_tokens" if reduction == "mean" else "sum"
    _, _, unchecked, same = run([ft.MicroBatching(3, count=rule, check=False)], batches, reduction=reduction)
    assert torch.equal(random, same)
    assert torch.equal(ours["loss"], unchecked["loss"])


def test_under_manual_optimization_trials_log_nothing():
    class ByHand(Shifted):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            step = super().training_step
            ft.accumulate_gradients(lambda part: step(part, batch_idx), batch, 3, backward=self.manual_backward)
            self.optimizers().step()
            self.optimizers().zero_grad()

    module = ByHand()
    t = trainer()
    t.fit(module, as_loader([PADDED]))
    parts = [{name: value[i : i + 3] for name, value in PADDED.items()} for i in (0, 3, 6)]
    net = Shifted()
    net.log = lambda *args, **kwargs: None
    expected = sum(float(net.training_step(part, 0).detach()) for part in parts) / 3
    assert float(t.callback_metrics["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_window_of_summed_losses_is_the_sum_over_its_batches():
    batches = lm_batches(4, size=6)
    both = [concatenate(batches[:2]), concatenate(batches[2:])]
    expected, *_ = run([], both, reduction="sum")
    seen, *_ = run([ft.TokenWeightedAccumulation(2), ft.MicroBatching(2)], batches, reduction="sum")
    assert max(map(largest_difference, expected, seen)) < 2e-6


def test_a_window_of_unsplittable_batches_is_weighted_by_the_loss_arguments():
    ragged = [(torch.zeros(3, dtype=torch.long), torch.tensor([1, 2, -100])), (torch.ones(2, dtype=torch.long),) * 2]
    batches = [{"input_ids": ids, "labels": labels, "other": torch.zeros(7)} for ids, labels in ragged]

    class Flat(TinyLM):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch["input_ids"][None])[0], batch["labels"])

    seen = Gradients()
    torch.manual_seed(5)
    trainer([ft.TokenWeightedAccumulation(2), seen]).fit(Flat(optimizer=sgd), as_loader(batches))
    net = TinyLM()
    losses = [F.cross_entropy(net(ids[None])[0], labels, reduction="sum") for ids, labels in ragged]
    (sum(losses) / 4).backward()
    assert largest_difference(gradients(net), seen.seen[0]) < 2e-6


def test_in_the_trainer_an_unsplittable_model_fails_on_its_first_batch():
    class Normed(TinyLM):
        def build(self):
            super().build()
            self.net = nn.Sequential(nn.Linear(DIM, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, VOCAB))

        def forward(self, ids):
            return self.net(self.embed(ids).mean(1))[:, None].expand(*ids.shape, VOCAB)

    module = Normed()
    with pytest.raises(ValueError, match=r"BatchNorm in training mode.*'net.1'.*\.eval\(\)"):
        fit(module, lm_batches(2), [ft.MicroBatching(2)])
    assert "log" not in vars(module)


def test_the_rule_is_saved_and_tried_first_after_a_resume(tmp_path):
    class Hidden(Shifted):  # its loss is hidden from autograd's graph
        def training_step(self, batch, batch_idx):
            logits, labels = self(batch["input_ids"])[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
            each = -logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
            return (each * (labels != -100)).sum() / (labels != -100).sum()

    first = ft.MicroBatching(2)
    t = trainer([first])
    t.fit(Hidden(), as_loader([PADDED]))
    assert first.found.count == CountRule("next_tokens")
    t.save_checkpoint(tmp_path / "a.ckpt")
    again = ft.MicroBatching(2)
    trainer([again], max_epochs=2).fit(Hidden(), as_loader([FULL]), ckpt_path=tmp_path / "a.ckpt")
    assert again.found.count == CountRule("next_tokens")


@pytest.mark.parametrize("limit", [1, 2])
def test_if_two_samples_do_not_fit_the_log_says_unchecked(limit):
    class Hungry(Shifted):
        def training_step(self, batch, batch_idx):
            if len(batch["labels"]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory (staged)")
            return super().training_step(batch, batch_idx)

    technique = ft.MicroBatching(9)
    if limit == 1:
        with pytest.warns(ft.FastTrainWarning, match="unchecked: the step failed on 2 samples alone: OutOf"):
            fit(Hungry(), [PADDED], [technique])
    else:
        fit(Hungry(), [PADDED], [technique])
        assert technique.found.count == CountRule("next_tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_under_autocast_the_rule_is_found_and_random_states_stay(dtype):
    net, step = language_model(shift=True)
    net.cuda()
    batch = {name: value.cuda() for name, value in PADDED.items()}
    state = torch.cuda.get_rng_state()
    assert ft.micro_batching.find_count(torch.autocast("cuda", dtype)(step), batch) == CountRule("next_tokens")
    assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.parametrize("error", [KeyError, AttributeError, AssertionError, RuntimeError])
def test_an_error_of_the_step_is_shown_as_it_is(error):
    def step(batch):
        raise error("of the user")

    with pytest.raises(error, match="of the user"):
        ft.micro_batching.find_count(step, torch.ones(4, 3))
