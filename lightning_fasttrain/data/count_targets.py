"""How many terms the mean loss of a batch averages over: what makes parts of a batch add up exactly."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fasttrain._labels import find_labels
from lightning_fasttrain._messages import note_once
from lightning_fasttrain.data.split_batch import batch_size

Count = Callable[[Any], Tensor | float]


def count_targets(batch: Any, ignore_index: int = -100) -> Tensor | int:
    """Count the targets that a mean loss averages over, by the suite's default rule.

    1. A mapping or dataclass with integer ``labels`` or ``targets``: the entries other than ``ignore_index``.
    2. A tuple or list: the same of its last integer tensor (or of the mapping in it that has labels).
    3. Anything else, for example regression: the number of samples.

    Which rule is used is logged once. Models that shift their labels inside (Hugging Face's ``...ForCausalLM``)
    never count the first target of a row: use :func:`count_next_tokens` with them.

    Args:
        batch: any batch that :func:`~lightning_fasttrain.split_batch` takes.
        ignore_index: the label that the loss leaves out; for another one, ``partial(count_targets, ignore_index=0)``.

    Returns:
        A 0-dimensional tensor on the labels' device, so that nothing waits for it; or an int by rule 3.

    Example:
        >>> import torch
        >>> count_targets({"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])})
        tensor(3)
        >>> count_targets((torch.zeros(4, 8), torch.tensor([0, 1, 1, -100])))
        tensor(3)
        >>> count_targets((torch.zeros(4, 8), torch.zeros(4)))
        4
    """
    where, labels = find_labels(batch)
    if labels is None:
        note_once("micro-batches are weighed by their number of samples (the batch has no integer labels)")
        return batch_size(batch)
    note_once(f"micro-batches are weighed by the entries of {where} other than {ignore_index}")
    return (labels != ignore_index).sum()


def count_next_tokens(batch: Any, ignore_index: int = -100) -> Tensor | int:
    """Count targets for models that shift the labels inside: the first of each row predicts nothing.

    Args:
        batch: as for :func:`count_targets`; labels of shape (B, T).
        ignore_index: the label that the loss leaves out.

    Example:
        >>> import torch
        >>> count_next_tokens({"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])})
        tensor(1)
    """
    where, labels = find_labels(batch)
    if labels is None or labels.ndim < 2:
        raise ValueError(
            "count_next_tokens: the batch has no integer labels of shape (B, T), so there are no next tokens. "
            "Use count_targets, or a count= function of your own."
        )
    note_once(f"micro-batches are weighed by the next-token entries of {where} other than {ignore_index}")
    return (labels[..., 1:] != ignore_index).sum()
