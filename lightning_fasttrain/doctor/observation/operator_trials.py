"""Trials of single operators: what a changed call of the same operator would take."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_fasttrain.core.device import fast_mixed_precision, time_ms
from lightning_fasttrain.doctor.observation.source_lines import Call, find_call
from lightning_fasttrain.model.kernels.matmul_precision import matmul_precision_

_aten = torch.ops.aten
# The place of the input among the arguments.
_CONVOLUTIONS = {_aten.convolution.default: 0, _aten.convolution_backward.default: 1}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
# Kernels read rows in units of this many elements; padded sizes are multiples of the larger unit.
_UNIT, _LARGE_UNIT = 8, 64


class Change(NamedTuple):
    """A change to one call of an operator.

    Attributes:
        cure: name of the change.
        of_tensor: tensor argument → what is passed instead.
        within: makes a context for the call, such as another setting of torch.
        searches: whether the first call with the change searches for the fastest kernel, which later ones need not.
    """

    cure: str
    of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    searches: bool = False


def find_changes(func: Any, args: Any) -> Iterator[Change]:
    """Yield the changes that apply to a call of an operator."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return
    tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
    if any(tensor.dtype == torch.float64 and tensor.numel() > 1 for tensor in tensors):
        yield Change("float32", _as_float32)
    elif func in _CONVOLUTIONS:
        yield from _changes_of_convolution(args[_CONVOLUTIONS[func]])
    elif func in _PRODUCTS:
        yield from _changes_of_product(tensors)


def _changes_of_convolution(images: Tensor) -> Iterator[Change]:
    if images.dim() == 4 and not images.is_contiguous(memory_format=torch.channels_last):
        yield Change("channels_last", _as_channels_last)
    if images.is_cuda and not torch.backends.cudnn.benchmark:
        yield Change("cudnn_benchmark", within=_cudnn_benchmark, searches=True)


def _changes_of_product(tensors: list[Tensor]) -> Iterator[Change]:
    device = tensors[0].device
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        if fast_mixed_precision(device) == "bf16-mixed":
            yield Change("bf16", _as_bf16)
        if could_use_tf32(device):
            yield Change("tf32", within=_tf32)
    sizes = {size for tensor in tensors for size in tensor.shape[-2:]}
    if any(map(_is_odd, sizes)):
        yield Change("padded_sizes", _pad_sizes)


def could_use_tf32(device: torch.device) -> bool:
    """Whether float32 products could run in TF32 on a device, and do not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return torch.backends.cuda.matmul.fp32_precision not in ("tf32", "bf16")


def _is_odd(size: int) -> bool:
    """Whether a size costs more than the next multiple of 64: a vocabulary of 50,257, for example."""
    return size > _LARGE_UNIT and size % _UNIT != 0


def _pad_sizes(tensor: Tensor) -> Tensor:
    """Return the tensor with zeros up to multiples of 64 in its last two dimensions, in the same order of memory."""
    if tensor.dim() >= 2 and tensor.stride(-1) != 1:
        return _pad_sizes(tensor.transpose(-1, -2)).transpose(-1, -2)
    padding: list[int] = []
    for size in reversed(tensor.shape[-2:]):
        padding += [0, 0]
        if _is_odd(size):
            padding[-1] = -size % _LARGE_UNIT
    return nn.functional.pad(tensor, padding)


def _as_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def _as_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16)


@contextmanager
def _tf32() -> Iterator[None]:
    undo = matmul_precision_("tf32")
    try:
        yield
    finally:
        undo()


@contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


@dataclass
class Trial:
    """Times of one operator with arguments of one shape, as it is and changed.

    Attributes:
        cure: name of the change.
        call: where it was called from first.
        base_ms: the time as it is, between the two others.
        changed_ms: the times with the change.
        count: how often it ran in the step.
    """

    cure: str
    call: Call
    base_ms: float
    changed_ms: list[float]
    count: int = 1


@dataclass
class OperatorTrials:
    """Tries each change once for each operator and shape, and counts how often each of them runs.

    Attributes:
        trials: what was tried.
        budget_s: seconds that are left; nothing new is tried afterwards.
        left_out: number of operators that were not tried because of it, by the name of the change.
        failed: what could not run with its change, for lack of memory or of a kernel.
    """

    trials: dict[tuple[object, ...], Trial] = field(default_factory=dict)
    budget_s: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    failed: set[tuple[object, ...]] = field(default_factory=set)

    def __call__(self, func: object, args: object, kwargs: object) -> None:
        """Time the operator as it is and changed, for each change that applies to it."""
        for change in find_changes(func, args):
            key = (change.cure, func, *_signature(args))
            if key in self.trials:
                self.trials[key].count += 1
            elif self.budget_s <= 0:
                self.left_out[change.cure] += 1
            elif key not in self.failed:
                self._try(key, change, func, args, kwargs)

    def _try(self, key: tuple[object, ...], change: Change, func: object, args: object, kwargs: object) -> None:
        began = perf_counter()
        try:
            self.trials[key] = _time_both(change, func, args, kwargs)
        except Exception:  # the training continues without it
            self.failed.add(key)
        self.budget_s -= perf_counter() - began


def _time_both(change: Change, func: Any, args: object, kwargs: Any) -> Trial:
    changed = tree_map(lambda leaf: change.of_tensor(leaf) if isinstance(leaf, Tensor) else leaf, args)
    with change.within():
        if change.searches:
            func(*changed, **kwargs)
        # First what is changed, which so pays for caches and for loading kernels.
        first_ms = _time(func, changed, kwargs)
    # The quicker of two, since what disturbs one of them would count as a gain.
    base_ms = min(_time(func, args, kwargs), _time(func, args, kwargs))
    with change.within():
        changed_ms = [first_ms, _time(func, changed, kwargs)]
    return Trial(change.cure, find_call(sys._getframe()), base_ms, changed_ms)


def _time(func: Any, args: Any, kwargs: Any) -> float:
    device = next(leaf.device for leaf in args if isinstance(leaf, Tensor))
    return time_ms(device, lambda: func(*args, **kwargs))


def _signature(args: Any) -> list[object]:
    described: list[object] = []
    for leaf in args:
        described.append((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf))
    return described
