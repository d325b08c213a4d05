"""Keep the integers of a batch in host memory, so that what depends on them is computed without waiting for a device.

Whether a mask hides anything, how long rows are and how many targets they have is known while the batch is on the CPU.
Once it is on a device, each such question waits until the device has finished all earlier work.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

_MOST_BYTES = 2**24  # of one tensor: token ids, masks and labels, not images
_KINDS = frozenset({torch.bool, torch.int32, torch.int64})


class _Copy(NamedTuple):
    """The values of a tensor on a device, as long as that tensor is at this version."""

    values: Tensor
    version: int


_reads: ContextVar[list[Tensor] | None] = ContextVar("_reads", default=None)
_copies: Any = WeakTensorKeyDictionary()  # tensor on a device → _Copy


def keep_on_host(moved: Tensor, values: Tensor) -> None:
    """Keep the values of a tensor on a device: its own copy of them, since loaders may write to their memory again.

    Nothing is kept of other dtypes than bool, int32 and int64, of tensors above 16 MiB, and in inference mode.

    Args:
        moved: tensor on a device.
        values: tensor in host memory with the same values.
    """
    is_same = moved.dtype == values.dtype and moved.shape == values.shape and moved.stride() == values.stride()
    is_kept = values.dtype in _KINDS and values.ndim > 0 and values.nbytes <= _MOST_BYTES
    if is_same and is_kept and moved.storage_offset() == 0 and not moved.is_inference():
        copy = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype).copy_(values)
        _copies[moved] = _Copy(copy, moved._version)


def forget_on_host(moved: Tensor) -> None:
    """Drop the values of a tensor on a device, which is written to without torch's noticing."""
    _copies.pop(moved, None)


def host_values(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on a device, or of a view of one, as they are kept; never wait for the device.

    Returns:
        A tensor in host memory: ``tensor`` itself, if it is there; None where the values are not kept, or the tensor
        has been changed in place since. A change through ``tensor.data`` is not seen, as it is not by autograd.

    Example:
        >>> ids = torch.tensor([[1, 2], [3, 4]])
        >>> with Transfers(torch.device("meta")):
        ...     moved = ids.to("meta")
        >>> host_values(moved[1:])
        tensor([[3, 4]])
        >>> host_values(moved + 1), host_values(moved.add_(1))
        (None, None)
    """
    if tensor.device.type == "cpu":
        return tensor
    base = tensor if tensor._base is None else tensor._base
    kept = _copies.get(base)
    if kept is None or tensor.dtype != base.dtype:
        return None
    if base._version != kept.version:
        del _copies[base]
        return None
    reads = _reads.get()
    if reads is not None:
        reads.append(base)
    if tensor is base:
        return kept.values
    return kept.values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def on_host_if_known(tensor: Tensor) -> Tensor:
    """Return :func:`host_values` of a tensor; where they are not known, the tensor itself."""
    values = host_values(tensor)
    return tensor if values is None else values


@contextmanager
def noting_reads() -> Iterator[list[Tensor]]:
    """Yield the tensors whose values are read by :func:`host_values` in the context, of a view the base."""
    found: list[Tensor] = []
    token = _reads.set(found)
    try:
        yield found
    finally:
        _reads.reset(token)


class Transfers(TorchDispatchMode):
    """Record the tensors that a transfer copies and creates, and keep the values of its integers on the host.

    Any object may define its own ``to``, so walking the batch cannot find all its tensors; nor does a comparison of the
    batch before and after the user's hooks show which tensor is a copy of which.

    Args:
        device: the device that the batch is copied to.

    Attributes:
        sources: tensors in host memory that were copied to the device.
        made: tensors that were created on the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.sources: list[Tensor] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = _list_tensors_on(self.device.type, result)
        self.made += made
        if made:
            self.sources += _list_tensors_on("cpu", args)
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            for moved in made:
                keep_on_host(moved, args[0])
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is entered where nothing is compiled, and the guard against it takes 50 µs for each operator


def _list_tensors_on(device_type: str, tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.device.type == device_type]
