"""Documents are packed whole, in few rows, and a model that lets them see one another is refused."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import lightning_fasttrain as ft

VOCAB = 50


def documents(seed: int, count: int = 40, longest: int = 60) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


def texts_in(rows: list[dict[str, Tensor]]) -> list[list[int]]:
    """Return the documents of rows, as their positions show them, without padding."""
    found = []
    for row in rows:
        starts = [*(row["position_ids"] == 0).nonzero()[:, 0].tolist(), len(row["position_ids"])]
        for begin, end in itertools.pairwise(starts):
            tokens = row["input_ids"][begin:end].tolist()
            if any(tokens):
                found.append(tokens)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_every_document_is_in_one_row_as_a_whole(seed):
    given = documents(seed)
    packed = ft.micro_batching.pack(given, tokens=64)
    rows = [packed[index] for index in range(len(packed))]
    assert sorted(texts_in(rows)) == sorted(document.tolist() for document in given)
    for row in rows:
        starts = (row["position_ids"] == 0) | (row["input_ids"] == 0)
        assert row["labels"].tolist() == row["input_ids"].masked_fill(starts, -100).tolist()


@pytest.mark.parametrize("seed", range(10))
def test_hardly_any_padding_is_left(seed):
    given = documents(seed, count=300)
    packed = ft.micro_batching.pack(given, tokens=64)
    fewest = -(-sum(map(len, given)) // 64)
    assert len(packed) <= 11 / 9 * fewest + 1  # the bound of the best-fit decreasing rule
    filled = sum(map(len, given))
    assert packed.padding == pytest.approx(1 - filled / (64 * len(packed)))
    assert packed.padding_before == pytest.approx(1 - filled / (64 * 300))
    assert packed.padding < 0.05 < packed.padding_before


def test_each_document_is_placed_in_the_fullest_row_that_has_space():
    packed = ft.micro_batching.pack([None] * 6, 10, lengths=[6, 2, 7, 3, 1, 1])
    assert packed.rows == [[(2, 0, 7), (3, 0, 3)], [(0, 0, 6), (1, 0, 2), (4, 0, 1), (5, 0, 1)]]


def test_a_document_longer_than_a_row_is_cut_into_several():
    long = torch.arange(1, 24)
    packed = ft.micro_batching.pack([long], tokens=10)
    assert [row["input_ids"].tolist() for row in map(packed.__getitem__, range(3))] == [
        [*range(1, 11)],
        [*range(11, 21)],
        [21, 22, 23, *[0] * 7],
    ]
    assert packed[1]["labels"].tolist() == [-100, *range(12, 21)]


def test_labels_of_a_document_are_kept():
    chat = {"input_ids": torch.tensor([4, 5, 6, 7]), "labels": torch.tensor([-100, -100, 6, 7])}
    packed = ft.micro_batching.pack([chat, {"input_ids": [8, 9]}], tokens=6, pad_id=3)
    assert packed[0]["input_ids"].tolist() == [4, 5, 6, 7, 8, 9]
    assert packed[0]["labels"].tolist() == [-100, -100, 6, 7, -100, 9]


def test_rows_are_the_same_in_any_order_and_in_workers():
    packed = ft.micro_batching.pack(documents(3), tokens=64)
    again = ft.micro_batching.pack(documents(3), tokens=64)
    loaded = list(DataLoader(packed, batch_size=2, num_workers=2))
    expected = [again[index]["input_ids"] for index in reversed(range(len(again)))]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in loaded]), torch.stack(expected[::-1]))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ft.micro_batching.pack([torch.ones(3)], 1),
            ValueError,
            "tokens=1: a row needs a token and its successor",
        ),
        (lambda: ft.micro_batching.pack([], 8), ValueError, "the dataset has no tokens"),
        (lambda: ft.micro_batching.pack(["text"], 8), TypeError, "document 0 is of type str: expected token ids"),
    ],
)
def test_wrong_documents_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Reader(nn.Module):
    """Causal attention, inside documents or over the whole row."""

    def __init__(self, separates: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.separates = separates

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        length = x.shape[1]
        allowed = torch.ones(length, length).tril().bool()[None]
        if self.separates:
            owner = (batch["position_ids"] == 0).cumsum(1)
            allowed = allowed & (owner[:, :, None] == owner[:, None, :])
        logits = self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=allowed))
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def batch_of(given: list[Tensor], tokens: int = 64) -> dict[str, Tensor]:
    packed = ft.micro_batching.pack(given, tokens)
    return default_collate([packed[index] for index in range(len(packed))])


def test_a_model_whose_documents_see_one_another_is_refused():
    batch = batch_of(documents(1))
    with pytest.raises(ValueError, match="the documents of a packed row see one another: with other tokens"):
        ft.micro_batching.check_documents(Reader(separates=False), batch)
    net = Reader(separates=True)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    drawn = torch.random.get_rng_state()
    assert ft.micro_batching.check_documents(net, batch) < 1e-6
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_rows_of_one_document_cannot_be_checked():
    with pytest.raises(ValueError, match="no row has a document with labels after another one"):
        ft.micro_batching.check_documents(Reader(separates=True), batch_of([torch.arange(1, 30)], tokens=29))


@pytest.mark.parametrize(
    ("kind", "config", "settings"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}),
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    ],
)
def test_hugging_face_models_train_on_a_row_as_on_its_documents(kind, config, settings):
    import transformers

    ids = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": VOCAB}
    torch.manual_seed(0)
    net = getattr(transformers, kind)(getattr(transformers, config)(**settings, **ids)).eval()
    given = documents(2, count=12)
    batch = batch_of(given)

    def step(rows: dict[str, Tensor]) -> Tensor:
        return net(**rows, use_cache=False).loss

    assert ft.micro_batching.check_documents(step, batch) < 1e-6
    with pytest.raises(ValueError, match="see one another"):
        ft.micro_batching.check_documents(lambda rows: net(rows["input_ids"], labels=rows["labels"]).loss, batch)
    net.zero_grad()
    step(batch).backward()
    packed = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    total = sum(len(document) - 1 for document in given)
    for document in given:
        if len(document) > 1:
            loss = net(document[None], labels=document[None]).loss
            (loss * (len(document) - 1) / total).backward()
    for one, other in zip(packed, net.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)
