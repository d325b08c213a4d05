"""Blocks that run the tokens of a padded batch alone: beside rows that run one by one, and beside the padded batch."""

import copy
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_fasttrain as ft
from lightning_fasttrain.micro_batching import PaddingFree, check_padding_free, remove_padding_
from lightning_fasttrain.micro_batching.padding.packed_forward import DocumentMask, attend, read_documents
from tests.micro_batching.test_trim_hugging_face import EXACT, GPT2, make, words
from tests.support.nets import as_loader, largest_difference, trainer, weights
from tests.support.padded_reader import EVERY, LENGTHS, LONGEST, VOCAB, WIDTH, Block, Reader, padded

BATCHES = [padded(shift=number) for number in range(4)]


@pytest.mark.parametrize("sees", EVERY)
def test_each_row_has_the_output_that_it_has_alone_without_padding(sees):
    net, batch = Reader(sees).double(), padded()
    remove_padding_(net)
    whole = net(batch["ids"], batch["kept"][:, None, None] & (EVERY[sees] > 0))
    for row, length in enumerate(LENGTHS):
        among = EVERY[sees][:length, :length] > 0
        alone = net(batch["ids"][row : row + 1, :length], among[None, None])
        assert torch.allclose(whole[row : row + 1, :length], alone, atol=1e-12)
    assert not whole[~batch["kept"]].any()


def test_the_layers_of_a_block_compute_no_padding():
    net, seen = Reader(), []
    net.blocks[1].up.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    remove_padding_(net)
    net.training_step(padded())
    assert seen == [(1, sum(LENGTHS), WIDTH)]
    net.eval()  # where a model may fill a cache of keys that a later step reads
    net.training_step(padded())
    assert seen[1] == (len(LENGTHS), LONGEST, WIDTH)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("sees", EVERY)
def test_the_gradient_is_that_of_the_padded_batch(sees, side):
    plain, batch = Reader(sees).double(), padded(side)
    net = copy.deepcopy(plain)
    remove_padding_(net)
    for one in (plain, net):
        one.training_step(batch).backward()
    for (name, expected), (_, found) in zip(plain.named_parameters(), net.named_parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, atol=1e-12), name


def test_other_tokens_in_one_row_do_not_reach_another():
    net, batch = Reader("earlier"), padded()
    remove_padding_(net)
    mask = batch["kept"][:, None, None] & (EVERY["earlier"] > 0)
    before = net(batch["ids"], mask)
    other = {**batch, "ids": batch["ids"].clone()}
    other["ids"][0] = VOCAB - 1
    after = net(other["ids"], mask)
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


class Listener(nn.Module):
    """PyTorch's own encoder, whose attention gets a key_padding_mask."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, **settings)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, batch: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        x = self.encoder(self.embed(batch["ids"]), mask=mask, src_key_padding_mask=~batch["kept"])
        return (x * batch["kept"][..., None]).sin().sum()


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_of_pytorch_runs_without_padding(norm_first):
    plain, seen = Listener(norm_first).double(), []
    net = copy.deepcopy(plain)
    remove_padding_(net)
    net.encoder.layers[1].linear1.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2].numel()))
    for one in (plain, net):
        one(padded()).backward()
    assert seen == [sum(LENGTHS)]
    for (name, expected), (_, found) in zip(plain.named_parameters(), net.named_parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, atol=1e-12), name
    causal = torch.ones(LONGEST, LONGEST).triu(1) > 0
    assert torch.allclose(net(padded(), causal), plain(padded(), causal))
    assert seen[1:] == [len(LENGTHS) * LONGEST]  # of two masks together nothing is known


class Keeping(nn.Module):
    """A block whose mask has two axes and shows what to keep, unlike a ``key_padding_mask``."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.block(x, attention_mask=attention_mask[:, None, None])[0]


def test_a_mask_of_two_axes_is_read_only_where_its_meaning_is_known():
    torch.manual_seed(0)
    blocks, x = nn.ModuleList([Keeping(), Keeping()]), torch.randn(len(LENGTHS), LONGEST, WIDTH)
    expected = blocks[0](x, padded()["kept"])
    remove_padding_(blocks, Keeping)
    assert torch.equal(blocks[0](x, padded()["kept"]), expected)


def masks() -> dict[str, tuple[Tensor, str]]:
    kept = padded()["kept"][:, None, None]
    full, causal = kept & (EVERY["all"] > 0), kept & (EVERY["earlier"] > 0)
    lowest = torch.finfo(torch.float64).min
    near = EVERY["earlier"].triu(-2) > 0
    added = torch.zeros(4, 1, LONGEST, LONGEST).double().masked_fill(~causal, lowest)
    bias = torch.randn(4, 2, LONGEST, LONGEST).double().masked_fill(~causal, -torch.inf)
    holes = causal.clone()
    holes[1, :, :, 4] = False
    return {
        "keys alone": (kept, "all"),
        "all": (full, "all"),
        "causal": (causal, "earlier"),
        "added": (added, "earlier"),
        "left": (kept.flip(-1) & (EVERY["earlier"] > 0), "earlier"),
        "with holes": (holes, "earlier"),
        "a window": (kept & near, "mask"),
        "a bias for each head": (bias, "mask"),
    }


@pytest.mark.parametrize("name", masks())
def test_attention_within_documents_is_that_of_a_block_diagonal_mask(name):
    mask, kind = masks()[name]
    documents = read_documents(mask)
    assert documents is not None
    assert documents.sees == kind
    heads = 4 if name != "a bias for each head" else 2
    query, (key, value) = (
        torch.randn(1, heads, documents.tokens, 4).double(),
        torch.randn(2, 1, 2, documents.tokens, 4).double(),
    )
    found = attend(query, key, value, DocumentMask.of(documents, mask), scale=0.3, enable_gqa=True)
    full = mask.expand(-1, -1, LONGEST, -1)
    full = full if full.dtype != torch.bool else torch.zeros(full.shape).double().masked_fill(~full, -torch.inf)
    rows, places = documents.index // LONGEST, documents.index % LONGEST
    among = full[rows[:, None], :, places[:, None], places[None]].permute(2, 0, 1)
    among = among.masked_fill(rows[:, None] != rows[None], -torch.inf)
    repeated = [x.repeat_interleave(heads // 2, 1) for x in (key, value)]
    scores = (0.3 * query @ repeated[0].mT + among).softmax(-1)
    assert torch.allclose(found, scores @ repeated[1], atol=1e-12)


def test_a_mask_without_padding_and_a_row_without_tokens_leave_rows_as_they_are():
    assert read_documents(torch.ones(3, 1, 1, 4, dtype=torch.bool)) is None
    mask = torch.tensor([[True, False], [False, False]])[:, None, None]
    documents = read_documents(mask)
    assert documents is not None
    assert documents.lengths == [1, 2]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM", "LlamaForCausalLM", "MistralForCausalLM"])
def test_models_of_hugging_face_run_without_padding(name):
    kind, config, settings, batch = next(row for row in EXACT if row[0] == name)
    model = make(kind, config, settings).train()
    remove_padding_(model)
    assert check_padding_free(lambda rows: model(**rows).loss, batch) < 1e-5


def test_positions_and_pooled_outputs_are_those_of_the_padded_batch():
    kind, config, settings, batch = next(row for row in EXACT if row[0].startswith("Roberta"))
    model = make(kind, config, settings).train()
    remove_padding_(model)
    assert check_padding_free(lambda rows: model(**rows).loss, batch) < 1e-5
    left = words("left")
    left["labels"] = left["labels"].masked_fill(left["attention_mask"].cumsum(1) == 1, -100)
    model = make("GPT2LMHeadModel", "GPT2Config", GPT2).train()
    remove_padding_(model)
    assert check_padding_free(lambda rows: model(**rows).loss, left) < 1e-5


REFUSED = {
    "T5ForConditionalGeneration": "computes with the mask",
    "MambaForCausalLM": "none of its blocks got a mask",
    "DebertaV2ForMaskedLM": "none of its blocks got a mask",
}


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_models_whose_attention_cannot_run_without_padding_are_refused(name, why):
    kind, config, settings, batch = next(row for row in EXACT if row[0] == name)
    model = make(kind, config, settings).train()
    remove_padding_(model)
    with pytest.raises(ValueError, match=why):
        check_padding_free(lambda rows: model(**rows).loss, batch)


@pytest.mark.parametrize(
    ("pooling", "why"), [("mean of all", "the gradient then differs"), ("logged", "the logged value 'size' depends")]
)
def test_a_loss_or_a_logged_value_that_depends_on_padding_is_refused(pooling, why):
    with pytest.raises(ValueError, match=why):
        trainer([PaddingFree()]).fit(Reader(pooling=pooling), as_loader(BATCHES))


JOINED = {
    "alone": [],
    "micro-batches": [ft.MicroBatching(2)],
    "recomputed": [ft.ActivationCheckpointing()],
}


@pytest.mark.parametrize("others", JOINED.values(), ids=JOINED)
def test_a_run_without_padding_ends_with_the_weights_of_a_plain_one(others):
    plain, net, seen = Reader("earlier"), Reader("earlier"), []
    trainer([], max_epochs=1).fit(plain, as_loader(BATCHES))
    keys, before = list(net.state_dict()), net.blocks[0].forward
    hook = net.blocks[1].up.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    trainer([PaddingFree(), *others], max_epochs=1).fit(net, as_loader(BATCHES))
    hook.remove()
    assert seen[-1] == 1
    assert largest_difference(weights(net), weights(plain)) < 1e-6
    assert list(net.state_dict()) == keys
    assert net.blocks[0].forward == before


def test_a_later_batch_that_would_change_ends_it_and_not_the_run():
    class Switching(Reader):
        def training_step(self, batch, batch_idx=0):
            self.pooling = "none" if batch_idx == 0 else "mean of all"
            return super().training_step(batch)

    plain, net = Switching(), Switching()
    trainer([], max_epochs=1).fit(plain, as_loader(BATCHES[:2]))
    with pytest.warns(ft.FastTrainWarning, match="the gradient then differs.*run with padding from here on"):
        trainer([PaddingFree(), _Unhurried()], max_epochs=1).fit(net, as_loader(BATCHES[:2]))
    assert largest_difference(weights(net), weights(plain)) < 1e-6


class _Unhurried(L.Callback):
    """Lets the second batch be looked at, though the run is short."""

    def on_train_start(self, t: L.Trainer, module: L.LightningModule) -> None:
        t.callbacks[0]._trial_schedule._began -= 1e6


def test_the_first_batch_without_padding_decides_nothing():
    whole = {"ids": torch.arange(4 * LONGEST).view(4, LONGEST) % 17 + 1, "kept": torch.ones(4, LONGEST).bool()}
    net, seen = Reader(), []
    net.blocks[1].up.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    trainer([PaddingFree()], max_epochs=1).fit(net, as_loader([whole, *BATCHES]))
    assert seen[0] == len(LENGTHS)
    assert seen[-1] == 1


@pytest.mark.gpu
def test_a_mask_on_a_gpu_shows_the_same_documents():
    mask = padded()["kept"][:, None, None] & (EVERY["earlier"] > 0)
    expected, found = read_documents(mask), read_documents(mask.cuda())
    assert expected is not None
    assert found is not None
    assert (found.lengths, found.sees) == (expected.lengths, expected.sees)
    assert torch.equal(found.index.cpu(), expected.index)
    assert torch.equal(found.offsets.cpu(), expected.offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("sees", EVERY)
def test_one_kernel_runs_all_documents_on_a_gpu(sees):
    mask = padded()["kept"][:, None, None] & (EVERY[sees] > 0)
    documents = read_documents(mask)
    assert documents is not None
    documents = replace(documents, index=documents.index.cuda(), offsets=documents.offsets.cuda())
    query = torch.randn(1, 4, documents.tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = torch.randn(2, 1, 2, documents.tokens, 64, device="cuda", dtype=torch.bfloat16)
    in_one = attend(query, key, value, DocumentMask.of(documents, mask.cuda()), enable_gqa=True)
    precise: list[Any] = [x.detach().float().requires_grad_() for x in (query, key, value)]
    one_by_one = attend(*precise, DocumentMask.of(documents, mask.cuda()), enable_gqa=True)
    assert torch.allclose(in_one.float(), one_by_one, atol=2e-2)
    in_one.float().sin().sum().backward()
    one_by_one.sin().sum().backward()
    assert torch.allclose(query.grad.float(), precise[0].grad, atol=5e-2)
