"""Count the terms that the loss of a batch averages over, so that micro-batches can be weighted exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_fasttrain.core.batch import find_labels
from lightning_fasttrain.core.batch.host_copies import host_values
from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, note_once

CountTargets = Callable[[Any], Tensor | float]
CountName = Literal["auto", "targets", "next_tokens", "samples", "sum"]
Count = CountTargets | CountName
NAMES = ("targets", "next_tokens", "samples", "sum")


@dataclass(frozen=True)
class CountRule:
    """A rule that computes the weight of a micro-batch; call it with one.

    Attributes:
        name: ``"targets"``: entries of the labels; ``"next_tokens"``: the same without the first of each row, which has
            no prediction; ``"samples"``; or ``"sum"``: the loss is a sum already, so micro-batch losses are added.
        ignore_index: the label that the loss ignores.

    Example:
        >>> import torch
        >>> CountRule("targets", ignore_index=0)({"labels": torch.tensor([[1, 2, 0], [3, 0, 0]])})
        tensor(3)
    """

    name: str
    ignore_index: int = -100

    def __call__(self, batch: object) -> Tensor | int:
        if self.name == "sum":
            return 1
        if self.name == "samples":
            return batch_size(batch)
        labels = find_labels(batch)[1]
        if labels is None or (self.name == "next_tokens" and labels.ndim < 2):
            shape = "" if self.name == "targets" else " of shape (B, T)"
            why = f"the batch has no integer labels{shape} to count"
            way_out = "Use count='samples', or pass a function as count="
            raise ValueError(explain(f"count={self.name!r}", why, way_out))
        if self.name == "next_tokens":
            labels = labels[..., 1:]
        known = None if labels.is_cpu else host_values(labels)
        if known is None:
            return (labels != self.ignore_index).sum()
        return int((known != self.ignore_index).sum())

    def __str__(self) -> str:
        return {
            "targets": f"its number of targets (labels != {self.ignore_index})",
            "next_tokens": f"its number of targets (labels != {self.ignore_index}, without the first of each row)",
            "samples": "its number of samples",
            "sum": "1 (the loss is a sum over samples)",
        }[self.name]


def named_count(count: Count) -> Count:
    """Return ``count`` as it is used: a rule for a name; ``"auto"`` and functions unchanged."""
    if isinstance(count, str) and count != "auto":
        return CountRule(count)
    return count


def rule_state(count: CountTargets | None) -> dict[str, Any]:
    """Return the checkpoint state of a rule that was found; empty for a user's function."""
    return {"count": count.name, "ignore_index": count.ignore_index} if isinstance(count, CountRule) else {}


def rule_in(state: dict[str, Any]) -> CountRule | None:
    """Return the rule that :func:`rule_state` wrote, if there is one."""
    return CountRule(state["count"], int(state["ignore_index"])) if state.get("count") in NAMES else None


@check_arguments
def count_targets(batch: object, ignore_index: int = -100) -> Tensor | int:
    """Count the targets that a mean loss averages over, in a batch that holds its labels.

    1. A mapping or dataclass with integer ``labels`` or ``targets``: the entries other than ``ignore_index``.
    2. A tuple or list: the same of its last integer tensor (or of the mapping in it that has labels).
    3. Anything else, for example regression: the number of samples.

    The rule that is used is logged once. Models that shift their labels inside (Hugging Face's ``...ForCausalLM``)
    never count the first target of a row: use :func:`count_next_tokens` with them.

    Args:
        batch: any batch that :func:`~lightning_fasttrain.micro_batching.split_batch` takes.
        ignore_index: the label that the loss ignores; for another one, ``partial(count_targets, ignore_index=0)``.

    Returns:
        A 0-dimensional tensor on the labels' device, so that the host does not wait for it; an int by rule 3, and for
        labels on a device whose values are known on the host, as with ``DevicePrefetch``.

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
        note_once("micro-batches are weighted by their number of samples (the batch has no integer labels)")
        return batch_size(batch)
    note_once(f"micro-batches are weighted by their number of targets ({where} != {ignore_index})")
    return CountRule("targets", ignore_index)(batch)


@check_arguments
def count_next_tokens(batch: object, ignore_index: int = -100) -> Tensor | int:
    """Count targets for models that shift the labels inside: the first label of each row has no prediction.

    Args:
        batch: as for :func:`count_targets`; labels of shape (B, T).
        ignore_index: the label that the loss ignores.

    Example:
        >>> import torch
        >>> count_next_tokens({"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])})
        tensor(1)
    """
    counted = CountRule("next_tokens", ignore_index)(batch)
    note_once(f"micro-batches are weighted by their number of next-token targets (labels != {ignore_index})")
    return counted
