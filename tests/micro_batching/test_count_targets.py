"""Counted targets follow the documented rule."""

import logging

import pytest
import torch

from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.micro_batching import count_next_tokens, count_targets

PADDED = torch.tensor([[1, 2, -100], [3, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": PADDED}, 3),
        ({"targets": PADDED, "other": torch.zeros(2, 9, dtype=torch.long)}, 3),
        ((torch.zeros(2, 3), PADDED), 3),
        ((torch.zeros(2, 3), {"labels": PADDED}), 3),
        ((PADDED, torch.zeros(2, 3)), 3),
        ({"inner": {"labels": PADDED}}, 3),
        ({"x": torch.zeros(2, 3), "labels": torch.zeros(2, 3)}, 2),
        ((torch.zeros(5, 2), torch.zeros(5)), 5),
        (torch.zeros(4, 2), 4),
    ],
)
def test_the_counting_rule(batch, expected):
    assert int(count_targets(batch)) == expected


def test_ignore_index_can_be_changed():
    assert int(count_targets({"labels": torch.tensor([0, 1, 2, 0])}, ignore_index=0)) == 2


def test_next_token_counts_skip_the_first_label():
    assert int(count_next_tokens({"labels": PADDED})) == 1
    with pytest.raises(ValueError, match="no integer labels of shape"):
        count_next_tokens({"labels": torch.tensor([1, 2])})


def test_the_rule_is_logged_once(caplog):
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="lightning_fasttrain"):
        count_targets({"labels": PADDED})
        count_targets({"labels": PADDED})
    assert [record.message for record in caplog.records] == [
        "micro-batches are weighted by their number of targets (batch['labels'] != -100)"
    ]
