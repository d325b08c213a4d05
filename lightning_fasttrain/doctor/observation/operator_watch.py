"""See each operator of a step by dispatch: host syncs, copies, float64, large results, and tensors that stay alive."""

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fasttrain.doctor.observation.module_watch import is_recomputed_later
from lightning_fasttrain.doctor.observation.source_lines import Call, SourceLine, find_call

_aten = torch.ops.aten
_SYNCS = {
    _aten._local_scalar_dense.default: "reads a value of a tensor",
    _aten.nonzero.default: "counts the elements that are not zero",
    _aten.masked_select.default: "selects by a mask, whose size is unknown before",
}
_SOFTMAXES = {_aten._softmax.default, _aten._safe_softmax.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class Event(NamedTuple):
    """An operator of interest.

    Attributes:
        kind: "sync", "list", "copy" between devices, "float64", "log_softmax", or "attention", the softmax of one.
        call: where it was called from.
        phase: the phase of the step.
        seconds: time of the operator itself, on the host.
        detail: half a sentence.
        nbytes: size of its result.
    """

    kind: str
    call: Call
    phase: str
    seconds: float
    detail: str
    nbytes: int


@dataclass
class Alive:
    """A tensor that a step made, or changed in place, as long as it lives."""

    tensor: weakref.ref[Tensor]
    line: SourceLine
    is_new: bool


class OperatorWatch(TorchDispatchMode):
    """Records the operators of one step; each runs unchanged.

    Args:
        phase: returns the name of the current phase.
        trial: called with each operator and its arguments before it runs; it may time the same on copies.
    """

    def __init__(self, phase: Callable[[], str], trial: Callable[..., None]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.made: list[Alive] = []
        self._phase, self._trial = phase, trial

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._trial(func, args, kwargs)
        began = perf_counter()
        result = func(*args, **kwargs)
        seconds = perf_counter() - began
        described, phase = _describe(func, args, result), self._phase()
        # The user's line is far up the stack there, and what these phases make is not the user's.
        if described is None and phase in ("backward", "optimizer"):
            return result
        call = find_call(sys._getframe(1))
        if described is not None:
            kind, detail = described
            nbytes = result.nbytes if isinstance(result, Tensor) else 0
            self.events.append(Event(kind, call, phase, seconds, detail, nbytes))
        if call.line is not None:
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    self.made.append(Alive(weakref.ref(tensor), call.line, not func._schema.is_mutable))
        return result

    def find_alive(self) -> dict[SourceLine, list[Tensor]]:
        """Return the tensors of the step that still exist, by the line that made them.

        Of those that were changed in place only the ones with a graph, which has grown.
        """
        found: dict[SourceLine, list[Tensor]] = {}
        for made in self.made:
            tensor = made.tensor()
            if tensor is not None and (made.is_new or tensor.grad_fn is not None):
                found.setdefault(made.line, []).append(tensor)
        return found


def _describe(func: Any, args: Any, result: Any) -> tuple[str, str] | None:
    """Return the kind and a description of an operator of interest; None for all others."""
    if func in _SYNCS:
        return "sync", _SYNCS[func]
    if func in _INDEXING and _has_mask(args[1]):
        return "sync", "indexes with a boolean mask"
    if func is _aten.lift_fresh.default:
        return ("list", f"a tensor of {result.numel()} elements") if result.numel() > 1 else None
    if func is _aten._log_softmax.default:
        return "log_softmax", " × ".join(map(str, result.shape))
    is_square = isinstance(result, Tensor) and result.dim() > 2 and result.shape[-1] == result.shape[-2]
    if func in _SOFTMAXES and is_square and not is_recomputed_later():
        return "attention", " × ".join(map(str, result.shape))
    if func is _aten._to_copy.default and args[0].device != result.device:
        return "copy", f"from {args[0].device} to {result.device}"
    if isinstance(result, Tensor) and result.dtype == torch.float64 and result.numel() > 1:
        return "float64", str(func)
    return None


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
