"""Pack documents into rows of one length, almost without padding, and check that documents do not see one another."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fasttrain.core.batch.leaves import pick_rows
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.micro_batching.normalizer.find_split import trial_step_of
from lightning_fasttrain.trial.runs import Run, relative_difference
from lightning_fasttrain.trial.sample_rows import Sample
from lightning_fasttrain.trial.try_split import run_again, try_unsplit

_IGNORED = -100
Piece = tuple[int, int, int]  # a document, and the place of its first token and of the one after its last


class PackedDocuments(Dataset[dict[str, Tensor]]):
    """Documents in rows of one length: see :func:`pack`.

    Attributes:
        tokens: length of a row.
        rows: the pieces of documents in each row.
        padding: share of the entries that is padding.
        padding_before: share that would be padding with one document in each row.
    """

    def __init__(self, dataset: Any, rows: list[list[Piece]], tokens: PositiveInt, pad_id: int) -> None:
        self.dataset, self.rows, self.tokens, self.pad_id = dataset, rows, tokens, pad_id
        pieces = [stop - start for row in rows for _, start, stop in row]
        self.padding = 1 - sum(pieces) / (len(rows) * tokens)
        self.padding_before = 1 - sum(pieces) / (len(pieces) * tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row: ``input_ids``, ``labels`` and ``position_ids`` of shape (tokens,)."""
        ids = torch.full((self.tokens,), self.pad_id)
        labels = torch.full((self.tokens,), _IGNORED)
        # Padding is a document of its own, which no other one sees.
        places = torch.arange(self.tokens)
        end = 0
        for document, start, stop in self.rows[index]:
            begin, end = end, end + stop - start
            found, wanted = _read(self.dataset[document], document)
            ids[begin:end], labels[begin:end] = found[start:stop], wanted[start:stop]
            labels[begin] = _IGNORED  # it would be predicted from the end of another document
            places[begin:end] = torch.arange(stop - start)
        places[end:] = torch.arange(self.tokens - end)
        return {"input_ids": ids, "labels": labels, "position_ids": places}

    def __repr__(self) -> str:
        documents = len({document for row in self.rows for document, _, _ in row})
        return (
            f"{documents:,} documents in {len(self):,} rows of {self.tokens:,} tokens: {self.padding:.1%} padding "
            f"({self.padding_before:.1%} with one document in each row)"
        )


@check_arguments
def pack(
    dataset: object, tokens: PositiveInt, *, lengths: Iterable[int] | None = None, pad_id: int = 0
) -> PackedDocuments:
    """Pack the documents of a dataset into rows of ``tokens`` tokens, by the best-fit decreasing rule.

    The longest documents are placed first, each into the fullest row that still has space for it. A document that is
    longer than a row is cut into several. Rows depend on the lengths alone, so that a sampler can shuffle, split and
    resume them as for any other dataset, at any step and with any number of ranks. It changes the training in so far as
    documents of a row share a batch.

    The documents of a row must not see one another. Models of Hugging Face separate them by ``position_ids`` that
    restart, if they get no ``attention_mask``; :func:`check_documents` shows whether a model does.

    Args:
        dataset: a map-style dataset whose samples are token ids of shape (length,), or mappings with ``"input_ids"``
            and, unless all tokens are to be predicted, ``"labels"``. Labels are those of the same place; the model
            shifts them.
        tokens: length of a row.
        lengths: the lengths of all documents, if they are known; otherwise each document is read once.
        pad_id: the token id of the remaining padding.

    Returns:
        A dataset of rows: mappings with ``input_ids``, ``labels`` (-100 at document starts and in padding) and
        ``position_ids``, each of shape (tokens,).

    Raises:
        TypeError: a sample holds no token ids.
        ValueError: ``tokens`` is less than 2, or there are no documents.

    Example:
        >>> packed = pack([torch.arange(1, 4), torch.arange(1, 6), torch.arange(1, 3)], tokens=5)
        >>> packed
        3 documents in 2 rows of 5 tokens: 0.0% padding (33.3% with one document in each row)
        >>> packed[1]["position_ids"]
        tensor([0, 1, 2, 0, 1])

    Source:
        Fewer Truncations Improve Language Modeling (arXiv:2404.10830).
    """
    if tokens < 2:
        raise ValueError(explain(f"tokens={tokens}", "a row needs a token and its successor", "Use tokens=4096"))
    sizes = list(_read_lengths(dataset) if lengths is None else lengths)
    if max(sizes, default=0) <= 0:
        raise ValueError(explain("the dataset has no tokens", "there is nothing to pack", "Check the documents"))
    pieces: list[Piece] = []
    for document, size in enumerate(sizes):
        pieces += [(document, start, min(start + tokens, size)) for start in range(0, size, tokens)]
    return PackedDocuments(dataset, _fill_rows(pieces, tokens), tokens, pad_id)


def _fill_rows(pieces: Sequence[Piece], tokens: PositiveInt) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    with_space: list[list[int]] = [[] for _ in range(tokens + 1)]  # rows by the space that they have left
    spaces = 0  # bit n is set if some row has space for n tokens: the fullest row that fits is then the lowest bit
    for piece in sorted(pieces, key=lambda piece: (piece[1] - piece[2], piece[0])):
        size = piece[2] - piece[1]
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = tokens, len(rows)
            rows.append([])
        rows[row].append(piece)
        if space > size:
            with_space[space - size].append(row)
            spaces |= 1 << (space - size)
    return rows


def _read_lengths(dataset: Any) -> Iterable[int]:
    for document in range(len(dataset)):
        yield len(_read(dataset[document], document)[0])


def _read(sample: object, document: int) -> tuple[Tensor, Tensor]:
    """Return the token ids of a document, and its labels."""
    ids = sample["input_ids"] if isinstance(sample, dict) else sample
    if not isinstance(ids, Tensor | list):
        why = "expected token ids, or a mapping with 'input_ids'"
        raise TypeError(explain(f"document {document} is of type {type(sample).__name__}", why, "Tokenize the texts"))
    ids = torch.as_tensor(ids)
    labels = sample.get("labels", ids) if isinstance(sample, dict) else ids
    return ids, torch.as_tensor(labels)


_ROUNDING = 1e-4


@check_arguments
def check_documents(step: Callable[[Any], object], batch: dict[str, Tensor]) -> float:
    """Raise if a document of a packed row sees another one.

    The tokens of the first document of a row are replaced, and neither the loss of the second one nor its gradient may
    change. The step runs twice on this row, without dropout, and is undone.

    Args:
        step: maps a batch to its loss, as for :func:`~lightning_fasttrain.accumulate_gradients`.
        batch: rows of :func:`~lightning_fasttrain.micro_batching.pack`: ``input_ids``, ``labels`` and ``position_ids``
            of shape (rows, tokens).

    Returns:
        The relative difference that was found, which is rounding.

    Raises:
        ValueError: the batch is not packed, no row has two documents with labels, or one sees another.

    Example:
        >>> net = torch.nn.Embedding(10, 10)
        >>> documents = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[-100, 2, -100, 4]])}
        >>> documents["position_ids"] = torch.tensor([[0, 1, 0, 1]])
        >>> def step(b):
        ...     return torch.nn.functional.cross_entropy(net(b["input_ids"]).transpose(1, 2), b["labels"])
        >>> check_documents(step, documents)
        0.0
    """
    row, begin, end = _find_second_document(batch)
    kept = pick_rows(batch, [row])
    kept["labels"][:, :begin] = kept["labels"][:, end:] = _IGNORED
    first = kept["input_ids"][:, :begin]
    # Other tokens that the model knows: the largest for the smallest, and so on.
    lowest, highest = kept["input_ids"].aminmax()
    changed = {**kept, "input_ids": torch.cat([lowest + highest - first, kept["input_ids"][:, begin:]], 1)}
    trial = try_unsplit(trial_step_of(step), Sample(kept, 1, []))
    other = run_again(trial_step_of(step), replace(trial, sample=Sample(changed, 1, [])))
    difference = _compare(trial.whole, other)
    if difference > _ROUNDING:
        why = f"with other tokens in the document before it, the gradient of a document differs by {difference:.1g}"
        way_out = (
            "Give the model position_ids without an attention_mask if it is one of Hugging Face's, or mask its "
            "attention by documents: (position_ids == 0).cumsum(1)"
        )
        raise ValueError(explain("the documents of a packed row see one another", why, way_out))
    return difference


def _find_second_document(batch: dict[str, Tensor]) -> tuple[int, int, int]:
    """Return a row with two documents or more, and where the second one begins and ends."""
    missing = sorted({"input_ids", "labels", "position_ids"} - set(batch))
    if missing:
        why = f"the batch has no {list_some(missing)}, by which documents are distinguished"
        raise ValueError(
            explain("documents cannot be checked", why, "Give a batch that ft.micro_batching.pack has packed")
        )
    for row, places in enumerate(batch["position_ids"]):
        _, *starts = [*(places == 0).nonzero()[:, 0].tolist(), places.shape[0]]
        for begin, end in itertools.pairwise(starts):
            if bool((batch["labels"][row, begin:end] != _IGNORED).any()):
                return row, begin, end
    why = "no row has a document with labels after another one"
    raise ValueError(explain("documents cannot be checked", why, "Give a batch with more rows"))


def _compare(one: Run, other: Run) -> float:
    entries = list(dict.fromkeys([*one.entries, *other.entries]))
    for run in (one, other):
        run.keep(entries)
    return relative_difference(one.values, other.values)
