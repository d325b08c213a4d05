"""Changed arguments and settings with which an operator may be faster: what a cure would make of each operator."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.machine import bf16_units
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
        if has_bf16(device):
            yield Change("bf16", _as_bf16)
        if could_use_tf32(device):
            yield Change("tf32", within=_tf32)
    sizes = {size for tensor in tensors for size in tensor.shape[-2:]}
    if any(map(_is_odd, sizes)):
        yield Change("padded_sizes", _pad_sizes)


def has_bf16(device: torch.device) -> bool:
    """Whether a device has units for bfloat16 products."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(bf16_units())


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
