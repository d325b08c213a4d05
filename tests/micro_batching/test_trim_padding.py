"""Padding is found in any form, cut off only where a trial shows the same gradient, and refused by name elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_fasttrain as ft
from lightning_fasttrain.core.batch.padded_axes import PaddedAxis, Padding, propose_padding
from lightning_fasttrain.core.batch.padding_share import group_rows, group_rows_evenly
from lightning_fasttrain.micro_batching.padding.try_trimming import trim_batch
from tests.support.nets import TinyLM, fit

LENGTHS = [3, 12, 5, 24, 2, 7, 9, 4]
WORDS, LONGEST = 40, 24


def flat_gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def texts(side: str = "right") -> tuple[Tensor, Tensor]:
    """Return token ids padded with 0, and which entries are tokens."""
    torch.manual_seed(0)
    places = torch.arange(LONGEST)[None]
    lengths = torch.tensor(LENGTHS)[:, None]
    tokens = places < lengths if side == "right" else places >= LONGEST - lengths
    return torch.randint(1, WORDS, (len(LENGTHS), LONGEST)) * tokens, tokens


class Tagger(nn.Module):
    """Attention with a padding mask, and a label for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:
        x = self.embed(ids)
        attended, _ = self.attend(x, x, x, key_padding_mask=~tokens, need_weights=False)
        return self.head(x + attended)


def mean_of_tokens(logits: Tensor, ids: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), (7 * ids + 1).remainder(WORDS).masked_fill(~tokens, -100))


@dataclass
class Pair:
    """A batch that is neither a tuple nor a mapping."""

    text: dict[str, Tensor]
    tokens: Tensor


def keep_mask(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    batch = {"ids": ids, "mask": tokens.long()}
    return batch, lambda b: mean_of_tokens(net(b["ids"], b["mask"].bool()), b["ids"], b["mask"].bool())


def pad_mask(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    return (ids, ~tokens), lambda b: mean_of_tokens(net(b[0], ~b[1]), b[0], ~b[1])


def left_padding(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts("left")
    batch = {"ids": ids, "mask": tokens}
    return batch, lambda b: mean_of_tokens(net(b["ids"], b["mask"]), b["ids"], b["mask"])


def lengths(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    # Random ids beyond the lengths: nothing else shows the padding.
    ids = texts()[0] + torch.randint(1, 5, (len(LENGTHS), LONGEST))

    def step(batch: Any) -> Tensor:
        tokens = torch.arange(batch[0].shape[1])[None] < batch[1][:, None]
        return mean_of_tokens(net(batch[0] % WORDS, tokens), batch[0] % WORDS, tokens)

    return (ids, torch.tensor(LENGTHS)), step


def pad_ids(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    return texts()[0], lambda ids: mean_of_tokens(net(ids, ids != 0), ids, ids != 0)


def nested(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    batch = Pair({"ids": ids, "names": torch.arange(len(ids))}, tokens)
    return batch, lambda b: mean_of_tokens(net(b.text["ids"], b.tokens), b.text["ids"], b.tokens)


def square_mask(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    allowed = (tokens[:, None, :, None] & tokens[:, None, None, :]) & torch.ones(LONGEST, LONGEST).tril().bool()

    def step(batch: Any) -> Tensor:
        tokens = batch["allowed"].diagonal(dim1=2, dim2=3)[:, 0]
        return mean_of_tokens(net(batch["ids"], tokens), batch["ids"], tokens)

    return {"ids": ids, "allowed": allowed}, step


def features(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    _, tokens = texts()
    sound = torch.randn(len(tokens), LONGEST, 16) * tokens[..., None]

    def step(batch: Any) -> Tensor:
        sound, tokens = batch
        attended, _ = net.attend(sound, sound, sound, key_padding_mask=~tokens, need_weights=False)
        squares = (net.head(attended).square() * tokens[..., None]).sum()
        return squares / tokens.sum()

    return (sound, tokens), step


def two_lengths(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    words = (ids[:, :10] * (torch.arange(10)[None] < torch.tensor([4, 1, 9, 2, 7, 3, 10, 6])[:, None])).flip(0)

    def step(batch: Any) -> Tensor:
        source, target = net.embed(batch["source"]), net.embed(batch["target"])
        attended, _ = net.attend(target, source, source, key_padding_mask=batch["source"] == 0, need_weights=False)
        labels = batch["target"].masked_fill(batch["target"] == 0, -100)
        return F.cross_entropy(net.head(attended).transpose(1, 2), labels)

    return {"source": ids, "target": words}, step


FORMS = [keep_mask, pad_mask, left_padding, lengths, pad_ids, nested, square_mask, features, two_lengths]


HOW = [{"n": 3}, {"n": 3, "trim_padding": True}, {"max_tokens": 30}, {"n": 1, "trim_padding": True}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "how", [{"n": 3}, {"n": 3, "trim_padding": True}, {"max_tokens": 30}, {"n": 1, "trim_padding": True}]
)
def test_the_gradient_of_trimmed_micro_batches_is_that_of_the_padded_batch(form, how):
    torch.manual_seed(0)
    net = Tagger()
    batch, step = form(net)
    step(batch).backward()
    expected = flat_gradient(net)
    seen: list[int] = []
    embed = net.attend if form is features else net.embed
    embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0] * args[0].shape[1]))
    for _ in range(3):  # the first two may try the step on a few rows
        net.zero_grad()
        seen.clear()
        loss = ft.accumulate_gradients(step, batch, **how)
    computed = sum(seen)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss, step(batch).detach())
    if how.get("n") != 1:
        assert computed < 0.75 * len(LENGTHS) * LONGEST * (1.5 if form is two_lengths else 1)


LOSSES = {
    "summed": lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"),
    "class weights": lambda logits, labels: F.cross_entropy(logits, labels, weight=torch.arange(1.0, WORDS + 1)),
    "other ignored label": lambda logits, labels: F.cross_entropy(logits, labels.clamp(min=0), ignore_index=0),
    "mean of samples": lambda logits, labels: (
        F.cross_entropy(logits, labels, reduction="none").sum(1) / (labels != -100).sum(1)
    ).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["plain", "tied", "frozen"])
def test_padding_is_cut_off_under_any_loss_that_ignores_it(loss, kind):
    torch.manual_seed(0)
    net, (ids, tokens) = Tagger(), texts()
    net.embed.weight.requires_grad_(kind != "frozen")
    if kind == "tied":
        net.head.weight = net.embed.weight
    batch = {"ids": ids, "mask": tokens, "labels": (7 * ids + 1).remainder(WORDS).masked_fill(~tokens, -100)}

    def step(b: Any) -> Tensor:
        return LOSSES[loss](net(b["ids"], b["mask"]).transpose(1, 2), b["labels"])

    step(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    ft.accumulate_gradients(step, batch, 3, trim_padding=True)
    assert (flat_gradient(net) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW, ids=str)
def test_padding_on_a_gpu_is_cut_off_with_the_same_gradient(how):
    torch.manual_seed(0)
    net = Tagger()
    batch, _ = keep_mask(net)
    net.cuda()
    batch = {name: value.cuda() for name, value in batch.items()}

    def step(b: Any) -> Tensor:
        return mean_of_tokens(net(b["ids"], b["mask"].bool()), b["ids"], b["mask"].bool())

    step(batch).backward()
    expected = flat_gradient(net)
    for _ in range(3):
        net.zero_grad()
        ft.accumulate_gradients(step, batch, **how)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-3, atol=1e-5)


# Training that padding takes part in.


def unmasked_mean(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    return {"ids": ids, "mask": tokens}, lambda b: net(b["ids"], b["mask"]).logsumexp(-1).mean(1).mean()


def convolution_over_padding(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    over = nn.Conv1d(16, 16, 5, padding=2)

    def step(batch: Any) -> Tensor:
        x = over(net.embed(batch["ids"]).transpose(1, 2)).transpose(1, 2)
        return mean_of_tokens(net.head(x), batch["ids"], batch["mask"])

    net.over = over
    return {"ids": ids, "mask": tokens}, step


def shifting_places(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts("left")
    net.places = nn.Embedding(LONGEST, 16)

    def step(batch: Any) -> Tensor:
        x = net.embed(batch["ids"]) + net.places(torch.arange(batch["ids"].shape[1]))
        return mean_of_tokens(net.head(x), batch["ids"], batch["mask"])

    return {"ids": ids, "mask": tokens}, step


def fixed_width(net: Tagger) -> tuple[Any, Callable[[Any], Tensor]]:
    ids, tokens = texts()
    net.out = nn.Linear(16 * LONGEST, 1)
    return {"ids": ids, "mask": tokens}, lambda b: net.out(net.embed(b["ids"]).flatten(1)).square().mean()


REFUSED = [
    (unmasked_mean, "padded entries take part in it"),
    (convolution_over_padding, "'over' is the first module that differs"),
    (shifting_places, "'places' is the first module that differs"),
    (fixed_width, "the step failed on 3 samples alone: RuntimeError mat1 and mat2"),
]


@pytest.mark.parametrize(("form", "why"), REFUSED)
def test_padding_that_takes_part_stays_and_cutting_it_is_refused(form, why, caplog):
    torch.manual_seed(0)
    net = Tagger()
    batch, step = form(net)
    step(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    with caplog.at_level("INFO"):
        ft.accumulate_gradients(step, batch, 3)
    assert "padding stays in the batches: " in caplog.text
    assert why in caplog.text
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="trim_padding=True cannot cut off the padding of this batch") as refused:
        ft.accumulate_gradients(step, batch, 3, trim_padding=True)
    assert why in str(refused.value)


def test_a_mask_that_disagrees_with_the_labels_is_refused_with_the_sample():
    torch.manual_seed(0)
    net, (ids, tokens) = Tagger(), texts()
    labels = ids.masked_fill(~tokens, -100)
    labels[4, 20] = 3  # a row of 2 tokens

    def step(batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["ids"], batch["mask"]).transpose(1, 2), batch["labels"])

    with pytest.raises(
        ValueError, match=r"batch\['labels'\] counts entry 20 of sample 4, which is padding by \['mask'\]"
    ):
        ft.accumulate_gradients(step, {"ids": ids, "mask": tokens, "labels": labels}, 3, trim_padding=True)


class Convolves(nn.Module):
    """A tagger whose convolution reads the padding beside a token; ``multiple`` is that of its lengths."""

    def __init__(self, multiple: int = 1, width: int = 5) -> None:
        super().__init__()
        self.multiple, self.embed = multiple, nn.Embedding(WORDS, 16)
        self.convolve, self.head = nn.Conv1d(16, 16, width, padding=width // 2), nn.Linear(16, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x.view(len(x), -1, self.multiple, 16).flatten(1, 2)  # an error at other lengths
        return self.head(torch.relu(self.convolve(x.mT)).mT)


@pytest.mark.parametrize("empty", [False, True], ids=["all rows have targets", "the shortest row has none"])
@pytest.mark.parametrize("multiple", [1, 8], ids=["exact lengths", "multiples of 8"])
def test_padding_beside_a_token_takes_part_though_the_shortest_row_does_not_show_it(multiple, empty):
    ids, tokens = texts()
    net = Convolves(multiple)
    counted = tokens.clone()
    # With multiples of 8, rows of 2 tokens end too far from the cut to see it; one of 7 or 24 sees it.
    counted[LENGTHS.index(min(LENGTHS))] &= not empty

    def step(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch["ids"]).transpose(1, 2), batch["labels"])

    batch = {"ids": ids, "attention_mask": tokens.long(), "labels": ids.masked_fill(~counted, -100)}
    step(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    ft.accumulate_gradients(step, batch, 4)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)


def test_padding_stays_undecided_while_no_row_that_is_cut_has_a_gradient(caplog):
    ids, tokens = texts()
    net = Convolves()
    longest = LENGTHS.index(max(LENGTHS))

    def step(batch: dict[str, Tensor]) -> Tensor:  # its labels are floats, so that no rule can read them
        losses = F.cross_entropy(net(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
        return (losses * batch["counts"]).sum() / batch["counts"].sum()

    counts = torch.zeros_like(tokens, dtype=torch.float)
    counts[longest] = 1.0
    batch = {"ids": ids, "attention_mask": tokens.long(), "counts": counts}
    step(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    ft.accumulate_gradients(step, batch, 4)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)
    assert "is padding, which is cut off" not in caplog.text


def test_a_side_on_which_entries_take_part_is_not_cut():
    """Labels of -100 are padding at the end of a row, but a prompt at its beginning."""
    torch.manual_seed(0)
    net, (ids, tokens) = Tagger(), texts()
    prompts = torch.tensor([0, 0, 0, 10, 0, 0, 0, 0])[:, None]
    labels = ids.masked_fill(~tokens | (torch.arange(LONGEST)[None] < prompts), -100)
    causal = torch.ones(LONGEST, LONGEST).triu(1).bool()

    def step(batch: Any) -> Tensor:
        x = net.embed(batch["ids"])
        length = x.shape[1]
        attended, _ = net.attend(x, x, x, attn_mask=causal[:length, :length], need_weights=False)
        return F.cross_entropy(net.head(attended).transpose(1, 2), batch["labels"])

    batch = {"ids": ids + torch.arange(LONGEST)[None] % 5, "labels": labels}  # no padding in the ids themselves
    batch["ids"] = batch["ids"].remainder(WORDS)
    step(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    ft.accumulate_gradients(step, batch, 3)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)
    net.zero_grad()
    seen: list[int] = []
    net.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    ft.accumulate_gradients(step, batch, 3)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)
    assert sum(seen[-3:]) < 0.75 * ids.numel()


def noisy(choose: Callable[[Tensor], Tensor]) -> tuple[Any, Callable[[Any], Tensor]]:
    """Return a masked language model that draws in its step which tokens it predicts."""
    torch.manual_seed(0)
    net, (ids, tokens) = Tagger(), texts()

    def step(batch: Any) -> Tensor:
        chosen = choose(torch.rand(batch["ids"].shape)) & batch["mask"]
        logits = net(batch["ids"].masked_fill(chosen, 1), batch["mask"])
        return F.cross_entropy(logits.transpose(1, 2), batch["ids"].masked_fill(~chosen, -100))

    return {"ids": ids, "mask": tokens}, step


@pytest.mark.parametrize("side", ["right", "left"])
def test_random_values_for_each_token_are_like_dropout(side, caplog):
    """A run draws other values than the padded step, of the same distribution."""
    batch, step = noisy(lambda drawn: drawn < 0.5)
    if side == "left":
        batch = {name: value.flip(1) for name, value in batch.items()}
    with caplog.at_level("INFO"):
        ft.accumulate_gradients(step, batch, 3, trim_padding=True)
    assert "of this batch is padding, which is cut off" in caplog.text


def test_random_values_that_depend_on_the_length_keep_the_padding():
    batch, step = noisy(lambda drawn: drawn.argsort(1).argsort(1) < drawn.shape[1] // 2)
    with pytest.raises(ValueError, match="trim_padding=True cannot cut off the padding"):
        ft.accumulate_gradients(step, batch, 3, trim_padding=True)


def test_a_loss_that_is_split_at_the_backbone_refuses_to_cut_padding():
    torch.manual_seed(0)
    net, (ids, tokens) = Tagger(), texts()

    def contrast(batch: Any) -> Tensor:
        pooled = (net(batch["ids"], batch["mask"]) * batch["mask"][..., None]).sum(1)
        return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))

    batch = {"ids": ids, "mask": tokens}
    contrast(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    ft.accumulate_gradients(contrast, batch, 3)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match="trim_padding=True with a loss that cannot be split: '.*' runs in micro-batches"
    ):
        ft.accumulate_gradients(contrast, batch, 3, trim_padding=True)


def test_a_logged_value_that_depends_on_padding_keeps_it():
    class Logs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger()

        def training_step(self, batch):
            self.log("tokens", batch["mask"].float().mean(), batch_size=len(batch["mask"]))
            return mean_of_tokens(self.net(batch["ids"], batch["mask"]), batch["ids"], batch["mask"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    ids, tokens = texts()
    module, micro = Logs(), ft.MicroBatching(3)
    run(module, [{"ids": ids, "mask": tokens}], micro)
    assert micro.trimming.padding is None
    assert micro.trimming.why_not == "the logged value 'tokens' depends on padding"


def run(module: L.LightningModule, batches: list[Any], *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(module, loader)
    return trainer


# In a run of the Trainer.


class TagTrainer(L.LightningModule):
    """Logs the loss, and returns the logits of its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Tagger()
        self.outputs: list[Any] = []
        self.logged: list[float] = []

    def training_step(self, batch):
        logits = self.net(batch["ids"], batch["mask"])
        loss = mean_of_tokens(logits, batch["ids"], batch["mask"])
        self.log("loss", loss)
        first = batch["ids"].gather(1, batch["mask"].long().argmax(1, keepdim=True))[:, 0]
        return {"loss": loss, "logits": logits.detach(), "first": first}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.logged.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def shuffled_batches(count: int = 4) -> list[Any]:
    ids, tokens = texts()
    batches = []
    for seed in range(count):
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
        batches.append({"ids": (ids * (seed + 1) % WORDS)[order] * tokens[order], "mask": tokens[order]})
    return batches


@pytest.mark.parametrize("how", [{"n": 3}, {"max_tokens": 40}, {"n": "auto"}, {"n": 1, "trim_padding": True}], ids=str)
def test_results_of_a_step_keep_the_order_and_the_shape_of_the_batch(how):
    plain, trimmed = TagTrainer(), TagTrainer()
    run(plain, shuffled_batches())
    run(trimmed, shuffled_batches(), ft.MicroBatching(**how))
    for one, other, batch in zip(plain.outputs, trimmed.outputs, shuffled_batches(), strict=True):
        assert one["first"].tolist() == other["first"].tolist()
        kept = one["logits"] * batch["mask"][..., None]
        torch.testing.assert_close(other["logits"] * batch["mask"][..., None], kept, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(trimmed.logged), torch.tensor(plain.logged), rtol=1e-5, atol=0)
    for one, other in zip(plain.parameters(), trimmed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_budget_of_tokens_bounds_every_micro_batch_and_a_longer_row_runs_alone(caplog):
    shapes, module, micro = [], TagTrainer(), ft.MicroBatching(max_tokens=20)
    module.net.embed.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    with caplog.at_level("INFO"):
        run(module, shuffled_batches(3), micro)
    in_last_batch = shapes[-micro.parts :]
    assert sum(rows for rows, _ in in_last_batch) == len(LENGTHS)
    assert [shape for shape in in_last_batch if shape[0] * shape[1] > 20] == [(1, 24)]
    assert caplog.text.count("a row of 24 tokens runs alone, above max_tokens=20") == 1
    assert 0.3 < micro.trimming.saved < 0.8
    assert micro.outcome(module) == f"{micro.trimming.saved:.0%} of the tokens were padding that did not run"


def test_windows_of_several_batches_are_trimmed_too():
    plain, trimmed = TagTrainer(), TagTrainer()
    widths = []
    trimmed.net.embed.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    run(plain, shuffled_batches(4), ft.TokenWeightedAccumulation(2))
    run(trimmed, shuffled_batches(4), ft.TokenWeightedAccumulation(2), ft.MicroBatching(3))
    assert min(widths[-3:]) < LONGEST
    for one, other in zip(plain.parameters(), trimmed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{"max_tokens": 40}, {"n": 3}, {"trim_padding": True}], ids=str)
def test_a_window_in_a_loop_is_cut_by_a_budget_of_tokens(how):
    torch.manual_seed(0)
    net, batches = Tagger(), shuffled_batches(3)
    batches[1] = {name: value[:2] for name, value in batches[1].items()}

    def step(batch: Any) -> Tensor:
        return mean_of_tokens(net(batch["ids"], batch["mask"]), batch["ids"], batch["mask"])

    step({name: torch.cat([batch[name] for batch in batches]) for name in ("ids", "mask")}).backward()
    expected, seen = flat_gradient(net), []
    net.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    for _ in range(2):  # the first call also tries the step on a few rows
        net.zero_grad()
        seen.clear()
        ft.accumulate_window(step, batches, **how)
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)
    assert sum(rows for rows, _ in seen) == 18
    if "max_tokens" in how:
        assert max(rows * length for rows, length in seen) <= 40


def test_batch_statistics_in_a_window_that_is_trimmed_are_refused():
    norm = nn.BatchNorm1d(16)
    net = Tagger()

    def step(batch: Any) -> Tensor:
        return (norm(net.embed(batch["ids"]).transpose(1, 2)).square().mean(1) * batch["mask"]).sum()

    with pytest.raises(ValueError, match="BatchNorm"):
        ft.accumulate_window(step, shuffled_batches(2), trim_padding=True)


def test_the_padding_that_was_found_is_in_the_checkpoint(tmp_path):
    micro = ft.MicroBatching(3)
    trainer = run(TagTrainer(), shuffled_batches(1), micro)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    other = ft.MicroBatching(3)
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    other.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
    assert micro.trimming.padding is not None
    assert other.trimming.padding == micro.trimming.padding


def test_batches_without_padding_are_split_as_they_are():
    module, micro = TagTrainer(), ft.MicroBatching(4)
    seen = []
    module.net.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0].tolist()))
    ids = torch.randint(1, WORDS, (8, 16))
    run(module, [{"ids": ids, "mask": torch.ones_like(ids).bool()}] * 2, micro)
    assert seen[-4:] == [ids[i : i + 2, 0].tolist() for i in range(0, 8, 2)]
    assert micro.trimming.saved == 0


@pytest.mark.parametrize("in_trainer", [True, False])
@pytest.mark.parametrize("trim_padding", [True, False])
def test_attention_of_many_lengths_is_left_to_kernels_that_need_no_plan_for_each(trim_padding, in_trainer):
    kernels, seen, module = torch.backends.cuda, [], TagTrainer()
    module.net.embed.register_forward_pre_hook(lambda *_: seen.append(kernels.cudnn_sdp_enabled()))
    how = {"n": 3, "trim_padding": trim_padding}

    def step(batch: Any) -> Tensor:
        return mean_of_tokens(module.net(batch["ids"], batch["mask"]), batch["ids"], batch["mask"])

    def train() -> list[bool]:
        if in_trainer:
            run(module, shuffled_batches(2), ft.MicroBatching(**how))
        else:
            ft.accumulate_gradients(step, shuffled_batches(1)[0], **how)
        assert kernels.cudnn_sdp_enabled()
        return seen[-3:]

    assert train() == [not trim_padding] * 3
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):  # chosen by the user, or measured
        assert train() == [True] * 3


def test_compiled_blocks_see_few_shapes():
    from torch._dynamo.utils import counters

    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(12):
        lengths = (3.5 + 0.6 * torch.randn(16, generator=generator)).exp().long().clamp(2, 128)
        kept = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        ids = torch.randint(1, 12, kept.shape, generator=generator) * kept
        batches.append({"input_ids": ids, "labels": ids.masked_fill(~kept, -100)})
    torch._dynamo.reset()
    counters.clear()
    micro = ft.MicroBatching(4)
    fit(TinyLM(), batches, [ft.CompileBlocks(backend="aot_eager"), micro])
    assert micro.trimming.saved > 0.3
    assert 1 <= counters["stats"]["unique_graphs"] < 6


# What is cut.


def padding_of(ids: Tensor) -> Padding:
    return Padding((PaddedAxis((("batch", (1,)),), "batch", 0),))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("multiple_of", [1, 4, 8])
def test_groups_hold_every_row_once_within_the_budget(seed, multiple_of):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 50, (17,), generator=generator)
    ids = (torch.arange(50)[None] < lengths[:, None]).long()
    extents = padding_of(ids).read(ids)
    groups = group_rows(extents, 60, multiple_of)
    assert sorted(row for rows in groups for row in rows) == list(range(17))
    trimmed = trim_batch(ids, extents, groups, multiple_of)
    for part, rows in zip(trimmed.parts, groups, strict=True):
        assert part.numel() <= 60 or len(rows) == 1
        assert part.sum() == lengths[rows].sum()
        assert part.shape[1] < lengths[rows].max() + multiple_of
    for n in (1, 4, 17, 30):
        even = group_rows_evenly(extents, n, multiple_of)
        assert len(even) <= n
        equal = max(-(-17 // n) * 50, int(lengths.max() + multiple_of))
        assert max(part.numel() for part in trim_batch(ids, extents, even, multiple_of).parts) <= equal


def divisions(rows: list[int], most: int) -> list[list[list[int]]]:
    """Return all ways to divide rows in order into groups."""
    if not rows:
        return [[]]
    if most == 0:
        return []
    found = []
    for end in range(1, len(rows) + 1):
        found += [[rows[:end], *rest] for rest in divisions(rows[end:], most - 1)]
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n", [2, 3, 5])
def test_groups_have_nearly_the_fewest_tokens_of_all_ways_to_divide_the_sorted_rows(seed, n):
    lengths = torch.randint(1, 40, (9,), generator=torch.Generator().manual_seed(seed))
    ids = (torch.arange(40)[None] < lengths[:, None]).long()
    extents = padding_of(ids).read(ids)
    budget = -(-9 // n) * 40
    order = lengths.argsort(descending=True).tolist()

    def tokens(groups: list[list[int]]) -> int:
        sizes = [len(rows) * int(lengths[rows].max()) for rows in groups]
        return sum(sizes) if max(sizes) <= budget else 10**9

    fewest = min(tokens(groups) for groups in divisions(order, n))
    assert tokens(group_rows_evenly(extents, n, 1)) <= 1.25 * fewest


@pytest.mark.parametrize(
    ("name", "other", "most"),
    [
        ("picture", torch.rand(8, 3, 4, 4), 2),
        ("tokens of another length", torch.ones(8, 10).long(), 2),
        ("metadata", torch.rand(8, 10), 7),
        ("class", torch.arange(8), 7),
    ],
)
def test_micro_batches_hold_no_more_pictures_than_with_padding(name, other, most):
    ids = (torch.arange(24)[None] < torch.tensor([24] + 7 * [2])[:, None]).long()
    axis = PaddedAxis((("batch['ids']", (1,)),), "batch['ids']", 0)
    extents = Padding((axis,)).read({"ids": ids, name: other})
    assert max(map(len, group_rows_evenly(extents, 4, 1))) == most


def test_two_sided_padding_is_cut_on_both_sides():
    ids = torch.tensor([[0, 0, 1, 2, 0, 0, 0, 0], [0, 3, 4, 0, 0, 0, 0, 0]])
    extents = padding_of(ids).read(ids)
    assert trim_batch(ids, extents, [[0, 1]], 1).parts[0].tolist() == [[0, 1, 2], [3, 4, 0]]
    assert trim_batch(ids, extents, [[0], [1]], 4).parts[0].tolist() == [[1, 2, 0, 0]]


def test_empty_rows_and_batches_without_padding():
    ids = torch.tensor([[0, 0, 0], [1, 0, 0]])
    extents = padding_of(ids).read(ids)
    assert [part.tolist() for part in trim_batch(ids, extents, [[1], [0]], 1).parts] == [[[1]], [[0]]]
    assert extents.filled == 1
    assert propose_padding(torch.ones(3, 4)) == []


# Mistakes.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ft.MicroBatching(), "neither n nor max_tokens= is given"),
        (lambda: ft.MicroBatching(4, max_tokens=100), "n and max_tokens= are both given"),
        (lambda: ft.MicroBatching(max_tokens=0), "max_tokens=0"),
        (lambda: ft.accumulate_window(len, [torch.ones(2, 3)], 2, max_tokens=4), "n and max_tokens= are both given"),
        (lambda: ft.micro_batching.TrimPadding(multiple_of=0), "multiple_of=0"),
        (
            lambda: ft.MicroBatching(4, split=lambda batch, n: [batch], trim_padding=True),
            "split= with trim_padding=True",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("how", [{"n": 2}, {"max_tokens": 8}, {"n": 1, "trim_padding": True}], ids=str)
def test_packed_sequences_are_refused_with_the_way_out(how):
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    net = nn.LSTM(2, 2)
    why = (
        r"batch\['text'\] is a PackedSequence: each of its rows holds a time step of all samples. Pack inside the model"
    )
    with pytest.raises(ValueError, match=why):
        ft.accumulate_gradients(lambda batch: net(batch["text"])[1][0].mean(), {"text": packed}, **how)


def test_lengths_that_do_not_exist_are_refused_with_the_names_that_do():
    net = Tagger()
    batch, step = keep_mask(net)
    with pytest.raises(ValueError, match=r"lengths='attention_mask': the batch has no tensor .* \['ids'\], \['mask'\]"):
        ft.accumulate_gradients(step, batch, 2, trim_padding=ft.micro_batching.TrimPadding(lengths="attention_mask"))
    with pytest.raises(TypeError, match=r"lengths=3\): expected a string, a function or None"):
        ft.micro_batching.TrimPadding(lengths=3)


def test_tokens_that_cannot_be_counted_are_refused():
    net = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="max_tokens=10 with a batch whose tokens cannot be counted"):
        ft.accumulate_gradients(lambda x: net(x.flatten(1)).mean(), torch.zeros(4, 1, 1, 3), max_tokens=10)


@pytest.mark.parametrize("lengths", ["mask", lambda batch: batch["mask"].sum(1)])
def test_what_shows_the_padding_can_be_given(lengths):
    torch.manual_seed(0)
    net = Tagger()
    batch, step = keep_mask(net)
    step(batch).backward()
    expected = flat_gradient(net)
    net.zero_grad()
    ft.accumulate_gradients(step, batch, 3, trim_padding=ft.micro_batching.TrimPadding(lengths=lengths))
    torch.testing.assert_close(flat_gradient(net), expected, rtol=1e-4, atol=1e-6)


def test_a_function_defined_in_the_loop_is_tried_once(caplog):
    net = Tagger()
    batch, step = keep_mask(net)
    with caplog.at_level("INFO"):
        for _ in range(3):
            how = ft.micro_batching.TrimPadding(lengths=lambda batch: batch["mask"].sum(1))
            ft.accumulate_gradients(step, batch, 3, trim_padding=how)
    assert caplog.text.count("of this batch is padding, which is cut off (read from lengths=)") == 1


def test_training_that_finds_no_padding_says_what_was_looked_for(recwarn):
    module = TagTrainer()
    ids = torch.randint(1, WORDS, (8, 16))
    run(module, [{"ids": ids, "mask": torch.ones_like(ids).bool()}] * 2, ft.MicroBatching(4, trim_padding=True))
    assert any(
        "no padding was found in the first batch (masks of zeros and ones" in str(one.message) for one in recwarn
    )


class Runner:
    """A training program's own object: neither a module nor a function."""

    def __init__(self, form: Callable[[Tagger], Any]) -> None:
        torch.manual_seed(0)
        self.net = Tagger()
        self.batch, self.loss = form(self.net)

    def step(self, batch: Any) -> Tensor:
        return self.loss(batch)


def test_each_model_is_tried_though_the_step_has_the_same_code():
    for form in (keep_mask, convolution_over_padding):
        runner = Runner(form)
        runner.step(runner.batch).backward()
        expected = flat_gradient(runner.net)
        for _ in range(2):
            runner.net.zero_grad()
            ft.accumulate_gradients(runner.step, runner.batch, 3)
            torch.testing.assert_close(flat_gradient(runner.net), expected, rtol=1e-4, atol=1e-6)
