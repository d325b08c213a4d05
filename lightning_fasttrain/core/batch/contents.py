"""Count samples, tokens and bytes of a batch, and find its labels, and the loss in what a step returns."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from lightning_fasttrain.core.messages import explain

LABELS = ("labels", "targets")


def count_batch(batch: object) -> tuple[int, int]:
    """Samples and tokens in a batch: the length of its first tensor, and the entries of the first one that looks
    like token ids (whole numbers of 32 or 64 bits, at least two axes); 0 for what is not there.

    Example:
        >>> import torch
        >>> count_batch({"input_ids": torch.zeros(4, 128, dtype=torch.long)}), count_batch([torch.zeros(4, 3)])
        ((4, 512), (4, 0))
    """
    samples, parts = 0, [batch]
    for part in parts:  # grows while it is walked
        if isinstance(part, Tensor):
            if part.ndim:
                samples = samples or len(part)
            if part.ndim > 1 and part.dtype in (torch.int64, torch.int32):
                return samples, part.numel()
        elif isinstance(part, list | tuple):
            parts.extend(part)
        elif isinstance(part, Mapping):
            parts.extend(part.values())
    return samples, 0


def count_bytes(batch: object) -> int:
    """The bytes of all tensors in a batch.

    Example:
        >>> import torch
        >>> count_bytes({"ids": torch.zeros(2, 3), "names": ["a", "b"]})
        24
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def find_labels(batch: object, path: str = "batch") -> tuple[str, Tensor | None]:
    """The integer labels that a batch's mean loss averages over, and where they are in it; None if there are none.

    These are ``labels`` or ``targets`` of a mapping or dataclass, or the last integer tensor of a tuple or list; else
    the same of what lies inside, the last first.

    Example:
        >>> find_labels((torch.zeros(2, 3), {"labels": torch.tensor([1, 2])}))
        ("batch[1]['labels']", tensor([1, 2]))
    """
    # Hugging Face's model outputs are dataclasses and mappings: as mappings, they leave out what is None.
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type | Mapping):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        for name in LABELS:
            if is_integer(batch.get(name)):
                return f"{path}[{name!r}]", batch[name]
        inner = [(f"{path}[{key!r}]", value) for key, value in batch.items()]
    elif isinstance(batch, list | tuple):
        inner = [(f"{path}[{i}]", value) for i, value in enumerate(batch)]
        for where, value in reversed(inner):
            if is_integer(value):
                return where, value
    else:
        return path, None
    for where, value in reversed(inner):
        found = find_labels(value, where)
        if found[1] is not None:
            return found
    return path, None


def is_integer(value: object) -> bool:
    """Whether ``value`` is a tensor of whole numbers with at least one axis (masks of bools are not)."""
    return (
        isinstance(value, Tensor)
        and value.ndim > 0
        and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    )


def loss_in(output: object, why: str) -> Tensor:
    """Return the loss in a step's output: a tensor, or the ``loss`` of a mapping or object.

    Args:
        output: what the step returned.
        why: why there must be a loss, for the message.

    Raises:
        TypeError: there is no loss tensor.

    Example:
        >>> loss_in({"loss": torch.ones(())}, why="it is trained on")
        tensor(1.)
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        way_out = "Return the loss, or a dict with a 'loss'"
        raise TypeError(explain(f"the step returned {type(output).__name__}", why, way_out))
    return loss


def with_loss(output: object, loss: Tensor) -> Any:
    """Return a step's output with another loss in the place of :func:`loss_in`'s.

    Example:
        >>> with_loss({"loss": torch.ones(()), "hits": 3}, torch.zeros(()))
        {'loss': tensor(0.), 'hits': 3}
    """
    if isinstance(output, Tensor):
        return loss
    output = copy.copy(output)  # the step may keep a reference to its output
    if isinstance(output, Mapping):
        output["loss"] = loss  # type: ignore[index]
    else:
        output.loss = loss
    return output
