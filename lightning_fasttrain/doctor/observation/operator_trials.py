"""Time an operator of the run a second time with a changed argument, on copies, to measure what a cure would bring."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_fasttrain.core.device import device_clock
from lightning_fasttrain.core.machine import bf16_units
from lightning_fasttrain.doctor.observation.source_lines import Call, find_call

_aten = torch.ops.aten
# The place of the input among the arguments.
_CONVOLUTIONS = {_aten.convolution.default: 0, _aten.convolution_backward.default: 1}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}

Change = Callable[[Tensor], Tensor]


@dataclass
class Trial:
    """Times of one operator with arguments of one shape, as it is and changed.

    Attributes:
        cure: name of the change.
        call: where it was called from first.
        base_ms: the time as it is, between the two others.
        changed_ms: the times with changed arguments.
        count: how often it ran in the step.
    """

    cure: str
    call: Call
    base_ms: float
    changed_ms: list[float]
    count: int = 1


@dataclass
class OperatorTrials:
    """Tries a changed argument once for each operator and shape, and counts how often each of them runs.

    Attributes:
        trials: what was tried.
        budget_s: seconds that are left; nothing new is tried afterwards.
        left_out: number of operators that were not tried because of it, by the name of the change.
    """

    trials: dict[tuple[object, ...], Trial] = field(default_factory=dict)
    budget_s: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    _tries_bf16: bool | None = None

    def __call__(self, func: Any, args: Any, kwargs: Any) -> None:
        """Time the operator as it is and changed, if a change applies to it."""
        found = self._find_change(func, args)
        if found is None:
            return
        cure, change = found
        key = (cure, func, *_signature(args))
        if key in self.trials:
            self.trials[key].count += 1
            return
        if self.budget_s <= 0:
            self.left_out[cure] += 1
            return
        began = perf_counter()
        changed = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, args)
        # First what is changed, which so pays for caches and for loading kernels.
        first_ms = _time(func, changed, kwargs)
        base_ms = _time(func, args, kwargs)
        changed_ms = [first_ms, _time(func, changed, kwargs)]
        self.trials[key] = Trial(cure, find_call(sys._getframe()), base_ms, changed_ms)
        self.budget_s -= perf_counter() - began

    def _find_change(self, func: Any, args: Any) -> tuple[str, Change] | None:
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
        if any(tensor.dtype == torch.float64 and tensor.numel() > 1 for tensor in tensors):
            return "float32", _as_float32
        if func in _CONVOLUTIONS and _could_be_channels_last(args[_CONVOLUTIONS[func]]):
            return "channels_last", _as_channels_last
        if func in _PRODUCTS and all(tensor.dtype == torch.float32 for tensor in tensors) and self._has_bf16(tensors):
            return "bf16", _as_bf16
        return None

    def _has_bf16(self, tensors: list[Tensor]) -> bool:
        if self._tries_bf16 is None:
            on_cuda = tensors[0].device.type == "cuda"
            self._tries_bf16 = (
                torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else bool(bf16_units())
            )
        return self._tries_bf16


def _time(func: Any, args: Any, kwargs: Any) -> float:
    device = next(leaf.device for leaf in args if isinstance(leaf, Tensor))
    began = device_clock(device)
    func(*args, **kwargs)
    return 1e3 * (device_clock(device) - began)


def _signature(args: Any) -> list[object]:
    described: list[object] = []
    for leaf in args:
        described.append((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf))
    return described


def _could_be_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last)


def _as_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def _as_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16)
