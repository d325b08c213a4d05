"""Padding is found in any form, cut off only where a trial shows the same gradient, and refused by name elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.data.padding.find_padding import propose_padding
from lightning_fasttrain.data.padding.padded_axes import PaddedAxis, Padding
from lightning_fasttrain.data.padding.trim_batch import group_rows, group_rows_evenly, trim_batch

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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", [{"n": 3}, {"n": 3, "trim_padding": True}, {"max_tokens": 30}, {"n": 1, "trim_padding": True}])
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
    (convolution_over_padding, "padded entries take part in it"),
    (shifting_places, "the places of the others count"),
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
    assert f"padding stays in the batches: " in caplog.text and why in caplog.text
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

    with pytest.raises(ValueError, match=r"batch\['labels'\] counts entry 20 of sample 4, which is padding by \['mask'\]"):
        ft.accumulate_gradients(step, {"ids": ids, "mask": tokens, "labels": labels}, 3, trim_padding=True)


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
