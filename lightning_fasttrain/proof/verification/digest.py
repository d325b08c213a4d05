"""Digests of tensors: enough to compare tensors that are no longer in memory."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_fasttrain.core.checks import require

_ENTRIES = 4096  # entries of a tensor that are kept; smaller tensors are kept completely
_F = TypeVar("_F", bound=Callable[..., Any])
_Join = Callable[[Tensor, Tensor], Tensor]
_ROWS, _COLUMNS = 256, 512  # of the random signs: up to 128 Ki entries, each has its own sign


@dataclass(frozen=True)
class Digest:
    """A sample of a tensor's entries, random sums over all of them, and a checksum of its bits.

    Digests of one shape can be added and subtracted like the tensors: the result is the digest of the sum or the
    difference, without a checksum.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        sums: sum of each column of the entries under random signs, in float64; empty if all entries are kept.
        checksum: checksum of the bits; None for a sum or a difference.

    Source:
        Alon, Matias & Szegedy 1996, "The Space Complexity of Approximating the Frequency Moments": the squares of sums
        under random signs add up to the squares of all entries, in expectation.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: Tensor
    checksum: int | None
    _entries: Tensor | Path

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def entries(self) -> Tensor:
        """The sampled entries, in float64, at the same positions for equal shapes."""
        stored = self._entries
        if isinstance(stored, Path):
            stored = _files().load_file(stored)["entries"]
        return stored.double()

    def norm(self, where: Tensor | None = None) -> float:
        """Return the Euclidean norm: exact if all entries are kept, otherwise estimated (standard deviation 3%).

        Args:
            where: mask of the sampled entries that count; the norm is then estimated over all such entries.
        """
        if where is None and self.sums.numel() > 0:
            return float(self.sums.norm())
        entries = self.entries
        scale = math.sqrt(self.numel / max(entries.numel(), 1))
        if where is not None:
            entries = entries[where]
        return scale * float(entries.norm())

    def item(self) -> bool | int | float:
        """Return the value of a tensor with one element."""
        number = self.entries.item()
        if self.dtype.is_floating_point:
            return number
        return bool(number) if self.dtype is torch.bool else int(number)

    def is_same(self, other: "Digest") -> bool:
        """Whether the tensors are bitwise equal, as far as their digests can show."""
        same_bits = (self.shape, self.dtype, self.checksum) == (other.shape, other.dtype, other.checksum)
        return same_bits and _equal(self.sums, other.sums) and _equal(self.entries, other.entries)

    def is_zero(self) -> bool:
        """Whether all entries are zero."""
        return not self.sums.any() and not self.entries.any()

    def __add__(self, other: "Digest") -> "Digest":
        return self._join(other.sums, other.entries, torch.add, torch.add)

    def __sub__(self, other: "Digest") -> "Digest":
        return self._join(other.sums, other.entries, _subtract_sums, _subtract)

    def _join(self, sums: Tensor, entries: Tensor, join_sums: _Join, join: _Join) -> "Digest":
        return Digest(self.shape, self.dtype, join_sums(self.sums, sums), None, join(self.entries, entries))


def _subtract(one: Tensor, other: Tensor) -> Tensor:
    """Subtract; infinities of one sign are equal, as in masks of attention, and NaN is equal to NaN."""
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).masked_fill(same, 0.0)


def _subtract_sums(one: Tensor, other: Tensor) -> Tensor:
    """Subtract; empty where some are not finite in both: they say nothing, so that the norm is that of the entries."""
    finite = one.isfinite()
    if finite.all() or not torch.equal(finite, other.isfinite()):
        return one - other
    return one.new_empty(0)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.nan_to_num(), other.nan_to_num()))  # NaN compares equal to NaN


def _unseen(function: _F) -> _F:
    """Keep a function's operations from what watches those of a step: its draws are not the step's."""

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return cast(_F, unseen)


@_unseen
@torch.no_grad()
def take_digest(tensor: Tensor, store: Path | None = None) -> Digest:
    """Compute the digest of a tensor on the tensor's device, and keep it on the CPU.

    Args:
        tensor: a tensor of any shape and dtype.
        store: a file to which all entries are written; by default a sample is kept in memory.

    Example:
        >>> one, other = torch.ones(3, 5), torch.zeros(3, 5)
        >>> round((take_digest(one) - take_digest(other)).norm() ** 2)
        15
    """
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1)
    if flat.device.type not in ("cpu", "cuda"):
        flat = flat.cpu()  # not every device supports float64
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size, entries = flat.numel(), flat
    if store is None and size > _ENTRIES:
        entries = flat[_places(size).to(flat.device)]
    kept: Tensor | Path = entries.cpu().clone()
    if store is not None:
        _files().save_file({"entries": kept}, store)
        kept = store
    sums = torch.empty(0)
    if entries is not flat:
        sums = _sum_under_signs(flat)
    return Digest(tuple(tensor.shape), tensor.dtype, sums, _sum_bits(flat), kept)


def find_differences(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that only one of the two has.

    Example:
        >>> nan = float("nan")
        >>> find_differences({"a": 1, "b": nan, "c": 0.0}, {"a": 2, "b": nan, "d": 0.0})
        ['a', 'c', 'd']
    """
    names = dict.fromkeys([*one, *other])
    return [name for name in names if name not in one or name not in other or not _are_same(one[name], other[name])]


def _are_same(one: object, other: object) -> bool:
    if isinstance(one, Digest) and isinstance(other, Digest):
        return one.is_same(other)
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # NaN equals NaN


def _files() -> Any:
    return require("safetensors.torch", extra="finetune")


def _sum_bits(flat: Tensor) -> int:
    """Return the sum of the bits as 64-bit integers, which wraps around; the fastest of the sums."""
    # A single value counts as contiguous whatever its stride, and cannot be viewed as bytes.
    if flat.stride(0) != 1 or flat.data_ptr() % 8 != 0:
        flat = flat.clone(memory_format=torch.contiguous_format)
    bits = flat.view(torch.uint8)
    whole = bits.numel() // 8 * 8
    return int(bits[:whole].view(torch.int64).sum()) + 257 * int(bits[whole:].sum())


def _sum_under_signs(flat: Tensor) -> Tensor:
    """Sum the entries under random signs, which are the same for all tensors of one size; shape [columns]."""
    block = _ROWS * _COLUMNS
    turns = torch.randint(2, (-(-flat.numel() // block),), generator=torch.Generator().manual_seed(flat.numel()))
    # The signs are the same in each block, so the blocks are added up first.
    total = torch.zeros(block, dtype=torch.float64, device=flat.device)
    for turn, part in zip(turns.tolist(), flat.split(block), strict=True):
        if part.element_size() == 1:  # 8-bit floats do not support addition
            part = part.float()
        total[: part.numel()].add_(part, alpha=2 * turn - 1)
    return (total.view(_ROWS, _COLUMNS) * draw_signs((_ROWS, _COLUMNS), 0).to(flat.device)).sum(0).cpu()


@functools.lru_cache(maxsize=64)
def draw_signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random entries of 1 and -1, the same for the same seed, without advancing torch's generators."""
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)).mul_(2).sub_(1).float()


@functools.lru_cache(maxsize=64)
def _places(size: int) -> Tensor:
    return torch.randint(size, (_ENTRIES,), generator=torch.Generator().manual_seed(size))
