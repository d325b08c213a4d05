"""Walk through a batch of any structure, count, split and pick its samples, and find its labels and loss."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.state.rng import keep_random_state


def batch_of(given: Any) -> Any:
    """Return a batch as it is; of a ``DataLoader`` its first one, without advancing random generators.

    Raises:
        ValueError: the loader has no batches.

    Example:
        >>> batch_of(DataLoader([1, 2, 3], batch_size=2))
        tensor([1, 2])
    """
    if not isinstance(given, DataLoader):
        return given
    with keep_random_state():
        for batch in given:
            return batch
    raise ValueError(explain("a loader in place of a batch", "it has no batches", "Check the dataset and its filters"))


def batch_size(batch: object) -> int:
    """Return the number of samples of a batch, by the rule of :func:`~lightning_fasttrain.micro_batching.split_batch`.

    Raises:
        ValueError: there is no tensor with a batch axis, it is 0, or two tensors disagree.

    Example:
        >>> import torch
        >>> batch_size((torch.zeros(3, 2), torch.zeros(3)))
        3
    """
    lengths: dict[str, int] = {}
    for path, leaf in list_leaves(batch).items():
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            lengths[path] = leaf.shape[0]
    if not lengths:
        why = "it holds no tensor with a batch axis"
        way_out = "Return tensors from the loader, or give MicroBatching a split= function"
        raise ValueError(explain(f"a batch of type {type(batch).__name__} cannot be split", why, way_out))
    first, size = next(iter(lengths.items()))
    if size == 0:
        why = "the mean loss of an empty batch is NaN"
        raise ValueError(explain(f"{first} has 0 samples", why, "Remove empty batches"))
    for path, length in lengths.items():
        if length != size:
            raise ValueError(
                explain(
                    f"{path} has {length} rows where {first} has {size}",
                    "every tensor is split along its first axis, so all must have the same length",
                    "Pad it to one row per sample, wrap it in an object of your own to repeat it in every micro-batch, "
                    "or give MicroBatching a split= function",
                )
            )
    return size


def can_be_cut(batch: object) -> bool:
    """Return whether :func:`~lightning_fasttrain.micro_batching.split_batch` can split a batch into samples."""
    try:
        return batch_size(batch) > 0
    except ValueError:
        return False


def list_leaves(value: object, path: str = "batch") -> dict[str, Any]:
    """Return the leaves of a batch, or of any arguments and outputs, by their paths.

    Example:
        >>> list_leaves({"ids": [1, 2], "name": "train"})
        {"batch['ids']": [1, 2], "batch['name']": 'train'}
    """
    found: dict[str, Any] = {}

    def note(leaf: object, path: str) -> Any:
        found[path] = leaf
        return leaf

    walk_leaves(value, note, path)
    return found


def list_tensors(value: object, path: str = "batch") -> dict[str, Tensor]:
    """Return the tensors among the leaves by their paths."""
    return {place: leaf for place, leaf in list_leaves(value, path).items() if isinstance(leaf, Tensor)}


def walk_leaves(value: object, visit: Callable[[Any, str], object], path: str) -> Any:
    """Rebuild ``value`` with every leaf replaced by ``visit(leaf, path)``; containers keep their type."""
    if isinstance(value, Tensor):
        if value.is_nested or value.is_sparse:
            way_out = "Give MicroBatching a split= function"
            raise ValueError(explain(f"{path} is a nested or sparse tensor", "it has no rows to split", way_out))
        return visit(value, path)
    if isinstance(value, PackedSequence):
        why = "each of its rows holds a time step of all samples"
        raise ValueError(explain(f"{path} is a PackedSequence", why, "Pack inside the model, after the split"))
    if isinstance(value, Mapping):
        parts = {key: walk_leaves(item, visit, f"{path}[{key!r}]") for key, item in value.items()}
        return _with_items(value, parts)
    if isinstance(value, list | tuple):
        if value and all(map(_is_plain, value)):
            return visit(value, path)
        items = [walk_leaves(item, visit, f"{path}[{i}]") for i, item in enumerate(value)]
        if hasattr(value, "_fields"):  # a named tuple takes its items as separate arguments
            return type(value)(*items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            part = walk_leaves(getattr(value, field.name), visit, f"{path}.{field.name}")
            object.__setattr__(result, field.name, part)  # also works for a frozen dataclass
        return result
    return visit(value, path)


def _with_items(mapping: Mapping[object, object], items: dict[object, object]) -> Any:
    if type(mapping) is dict:
        return items
    result: Any = copy.copy(mapping)  # keeps the type and other attributes
    try:
        for key, item in items.items():
            result[key] = item
    except TypeError:  # a read-only mapping
        return items
    return result


def _is_plain(value: object) -> bool:
    """Whether a collate function leaves this value in a list with one entry per sample."""
    return isinstance(value, str | bytes | int | float | complex) or (
        value is not None
        and not isinstance(value, Tensor | np.ndarray | Mapping | list | tuple)
        and not dataclasses.is_dataclass(value)
    )


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
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            parts.extend(getattr(part, one.name, None) for one in dataclasses.fields(part))  # some are set later
    return samples, 0


def kind_of_batch(batch: object) -> str:
    """Return what a batch holds: ``"images"``, real numbers of four axes or more; ``"tokens"``; or ``"other"``.

    Example:
        >>> import torch
        >>> kind_of_batch([torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long)])
        'images'
        >>> kind_of_batch({"input_ids": torch.zeros(4, 128, dtype=torch.long)}), kind_of_batch(torch.zeros(4, 3))
        ('tokens', 'other')
    """
    if any(tensor.ndim >= 4 and tensor.is_floating_point() for tensor in list_tensors(batch).values()):
        return "images"
    return "tokens" if count_batch(batch)[1] else "other"


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


@check_arguments
def split_batch(batch: object, n: PositiveInt) -> list[Any]:
    """Split ``batch`` into ``n`` micro-batches of neighbouring samples, whose sizes differ by one at most.

    The rule: the first axis of every tensor (or NumPy array) with an axis is the batch axis, and all of them have the
    same length B. A list or tuple of B plain values such as strings is split likewise. Everything else, such as
    0-dimensional tensors, strings, None and your own objects, is repeated in every micro-batch. Tuples, lists, mappings
    (``BatchEncoding`` too), dataclasses and named tuples are traversed and keep their type; tensors are split without
    copying.

    Args:
        batch: tensors of shape (B, ...), in any nesting.
        n: number of micro-batches, at least 1. A batch of fewer than n samples gives one micro-batch per sample.

    Returns:
        ``min(n, B)`` batches of the same structure.

    Raises:
        ValueError: nothing to split, no samples, or a leaf of another length; the message names the leaf.

    Example:
        >>> import torch
        >>> parts = split_batch({"x": torch.arange(5), "name": "train"}, 2)
        >>> [(part["x"].tolist(), part["name"]) for part in parts]
        [([0, 1, 2], 'train'), ([3, 4], 'train')]
    """
    size = batch_size(batch)
    stops = list(itertools.accumulate(split_sizes(size, n)))
    return [_select(batch, slice(start, stop), size) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def split_sizes(size: int, n: PositiveInt) -> list[int]:
    """Return the sizes of ``n`` micro-batches, which differ by one at most; one per sample where there are fewer.

    Example:
        >>> split_sizes(5, 2), split_sizes(2, 4)
        ([3, 2], [1, 1])
    """
    n = min(n, size)
    share, rest = divmod(size, n)
    return [share + 1] * rest + [share] * (n - rest)


def take_rows(batch: object, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of ``batch``, by the rule of :func:`split_batch`.

    Example:
        >>> import torch
        >>> take_rows((torch.arange(5), "train"), 1, 3)
        (tensor([1, 2]), 'train')
    """
    return _select(batch, slice(start, stop), batch_size(batch))


def pick_rows(batch: object, rows: list[int]) -> Any:
    """Return the samples with these indices, in their order, by the rule of :func:`split_batch`; indices may repeat.

    Example:
        >>> import torch
        >>> pick_rows((torch.arange(5), ["a", "b", "c", "d", "e"]), [4, 0, 4])
        (tensor([4, 0, 4]), ['e', 'a', 'e'])
    """
    return _select(batch, rows, batch_size(batch))


def reverse_rows(batch: object) -> Any:
    """Return the samples of ``batch`` in reverse order, by the rule of :func:`split_batch`.

    Example:
        >>> import torch
        >>> reverse_rows((torch.arange(3), ["a", "b", "c"]))
        (tensor([2, 1, 0]), ['c', 'b', 'a'])
    """
    # By indices, since torch does not accept arrays with negative strides.
    return pick_rows(batch, list(reversed(range(batch_size(batch)))))


def _select(batch: object, rows: slice | list[int], size: int) -> Any:
    def select(leaf: object, path: str) -> Any:
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0:
            return leaf[rows]
        if isinstance(leaf, list | tuple) and len(leaf) == size:
            if isinstance(rows, slice):
                return leaf[rows]
            return type(leaf)(map(leaf.__getitem__, rows))
        return leaf

    return walk_leaves(batch, select, "batch")
