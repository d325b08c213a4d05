"""Any batch splits by the documented rule, or an error names the leaf."""

import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_fasttrain.micro_batching import split_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list[str]
    scale: float = 2.0


@pytest.mark.parametrize(("rows", "n", "sizes"), [(6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1]), (5, 1, [5])])
def test_sizes_differ_by_one_at_most(rows, n, sizes):
    assert [len(part) for part in split_batch(torch.arange(rows), n)] == sizes


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(10).view(5, 2),
        (torch.arange(5), torch.arange(5.0)),
        [torch.arange(5), {"y": torch.arange(5)}],
        {"x": torch.arange(5), "inner": {"y": (torch.arange(5), np.arange(5))}},
        OrderedDict(x=torch.arange(5)),
        Pair(torch.arange(5), torch.arange(5)),
        Sample(torch.arange(5), list("abcde")),
    ],
)
def test_micro_batches_concatenate_to_the_batch_and_keep_its_type(batch):
    from torch.utils._pytree import tree_leaves

    def leaves(value):
        fields = [value.x, value.names] if isinstance(value, Sample) else value
        return [leaf for leaf in tree_leaves(fields) if isinstance(leaf, torch.Tensor | np.ndarray)]

    parts = split_batch(batch, 2)
    assert {type(part) for part in parts} == {type(batch)}
    for whole, *slices in zip(leaves(batch), *map(leaves, parts), strict=True):
        assert np.array_equal(np.concatenate(slices), whole)


def test_lists_are_split_with_their_samples_and_other_leaves_are_kept():
    batch = {
        "x": torch.arange(3),
        "texts": ["a", "b", "c"],
        "pair": ("left", "right"),
        "note": "abc",
        "none": None,
        "scalar": torch.tensor(7.0),
    }
    first, second = split_batch(batch, 2)
    assert (first["texts"], second["texts"]) == (["a", "b"], ["c"])
    for part in (first, second):
        assert part["pair"] == ("left", "right")
        assert (part["note"], part["none"], part["scalar"].item()) == ("abc", None, 7.0)


def test_batch_encoding_of_hugging_face():
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.arange(6).view(3, 2), "labels": torch.arange(3)})
    parts = split_batch(batch, 3)
    assert all(isinstance(part, BatchEncoding) for part in parts)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    assert len(batch["input_ids"]) == 3  # the batch itself is untouched


def test_micro_batches_are_views():
    batch = torch.zeros(4, 2)
    assert all(
        part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for part in split_batch(batch, 2)
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4), "boxes": [torch.zeros(3, 4), torch.zeros(5, 4)]}, r"batch\['boxes'\]\[0\] has 3 rows"),
        ((torch.zeros(4), {"y": torch.zeros(3)}), r"batch\[1\]\['y'\] has 3 rows where batch\[0\] has 4"),
        (torch.zeros(0, 2), "batch has 0 samples"),
        ("text", "a batch of type str cannot be split"),
        (None, "a batch of type NoneType cannot be split"),
        (torch.tensor(1.0), "it holds no tensor with a batch axis"),
        ([torch.zeros(2), pack_sequence([torch.zeros(2), torch.zeros(1)])], r"batch\[1\] is a PackedSequence"),
        (torch.zeros(2, 2).to_sparse(), "batch is a nested or sparse tensor"),
    ],
)
def test_unsplittable_leaves_are_named(batch, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 2)


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_an_invalid_number_of_micro_batches_is_refused(n, error):
    with pytest.raises(error, match=f"n={n}"):
        split_batch(torch.zeros(4), n)
