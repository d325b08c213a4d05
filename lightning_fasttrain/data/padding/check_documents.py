"""Check on the user's own model that the documents of a packed row do not see one another."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.data.normalizer.find_count import stage_of
from lightning_fasttrain.data.normalizer.trial.runs import Run, relative_difference
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import run_again, try_unsplit
from lightning_fasttrain.data.split_batch import pick_rows

_IGNORED = -100
_ROUNDING = 1e-4


@check_arguments
def check_documents(step: Callable[[Any], object], batch: dict[str, Tensor]) -> float:
    """Raise if a document of a packed row sees another one.

    The tokens of the first document of a row are replaced, and neither the loss of the second one nor its gradient may
    change. The step runs twice on this row, without dropout, and is undone.

    Args:
        step: maps a batch to its loss, as for :func:`~lightning_fasttrain.accumulate_gradients`.
        batch: rows of :func:`~lightning_fasttrain.data.pack`: ``input_ids``, ``labels`` and ``position_ids`` of shape
            (rows, tokens).

    Returns:
        The relative difference that was found, which is rounding.

    Raises:
        ValueError: no row has two documents with labels, or one sees another.

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
    trial = try_unsplit(stage_of(step), Sample(kept, 1, []))
    other = run_again(stage_of(step), replace(trial, sample=Sample(changed, 1, [])))
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
