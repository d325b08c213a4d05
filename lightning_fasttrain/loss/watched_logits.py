"""Logits with values that record whether deferred logits could replace them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodWrapperType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.loss.deferred_logits import DeferredLogits

_Tensor: Any = Tensor  # to type checkers its properties are values
# Strategies and precision plugins query these on each tensor of an output. Deferred logits, which are not tensors, are
# skipped.
_ASKED_OF_TENSORS = {
    _Tensor.requires_grad.__get__,
    _Tensor.grad_fn.__get__,
    _Tensor.is_leaf.__get__,
    _Tensor.is_nested.__get__,
    _Tensor.layout.__get__,
    Tensor.is_floating_point,
    Tensor.register_hook,
}


@dataclass
class HeadEvidence:
    """Evidence from the training steps so far about one linear layer.

    Attributes:
        ended: whether a gradient reached its output, from any source.
        reached: whether the output reached a cross-entropy.
        refused: the first operation on the output that deferred logits do not support; "" if there was none.
    """

    ended: bool = False
    reached: bool = False
    refused: str = ""

    @property
    def is_head(self) -> bool:
        return self.reached and not self.refused

    def add(self, other: "HeadEvidence") -> None:
        self.ended |= other.ended
        self.reached |= other.reached
        self.refused = self.refused or other.refused


class ObservedHead(Protocol):
    """The part of a fused head that :class:`HeadSearch` needs."""

    evidence: HeadEvidence


class HeadSearch:
    """The layers of one model among which the first training loss identifies the heads.

    Attributes:
        candidates: qualified name → object that replaces the layer's forward.
        told: whether it was reported that no candidate is a head, or a Trainer will report it.
    """

    def __init__(self) -> None:
        self.candidates: dict[str, ObservedHead] = {}
        self.told = False

    def found(self) -> list[str]:
        return [name for name, head in self.candidates.items() if head.evidence.is_head]

    def why_none(self) -> tuple[str, str] | None:
        """Return why no candidate is the head, and what to do; None if one is."""
        if self.found():
            return None
        uses: list[str] = []
        for name, head in self.candidates.items():
            if head.evidence.reached:
                uses.append(f"the logits of '{name}' are also used for {head.evidence.refused}")
        if uses:
            return "; ".join(uses), "Use the logits for cross_entropy alone, or leave FusedLossHead out"
        for name, head in self.candidates.items():
            used = f", used for {head.evidence.refused}" if head.evidence.refused else ""
            uses.append(f"'{name}'{used}")
        why = f"no output of a linear layer outside of the repeated blocks ({list_some(uses)}) reached cross_entropy"
        way_out = "Compute the loss with torch's cross_entropy, compile the blocks alone, with CompileBlocks"
        return why, f"{way_out}, name the head in head=, or leave FusedLossHead out"

    def tell(self) -> None:
        """Warn once if there is no head when a second forward begins, unless a Trainer reports it."""
        if self.told or not any(head.evidence.ended for head in self.candidates.values()):
            return
        reason = self.why_none()
        if reason is not None:
            self.told = True
            warn(explain("FusedLossHead did nothing in the first batch", *reason))


def _watch_function(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    # Records made while tracing would be missing at run time.
    if torch.compiler.is_compiling():
        return result
    watched = [one for one in tree_leaves((args, kwargs)) if _is_watched(one)]
    if not watched or func in _ASKED_OF_TENSORS:
        return result
    try:
        deferred = _do_likewise(func, tree_map(_deferred_of, tuple(args)), tree_map(_deferred_of, kwargs))
    except Exception as error:
        # Training with deferred logits would raise the error, too.
        for one in watched:
            one.evidence.refused = one.evidence.refused or _refused_in(error, func)
        return result
    return _mark(result, deferred, watched[0].evidence)


class _Watched:
    """A tensor of logits that applies each operation to deferred logits, too.

    The values are those of the plain tensor. Operations that deferred logits do not support are recorded as evidence,
    and their results are plain tensors.
    """

    deferred: DeferredLogits
    evidence: HeadEvidence

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _watch_function(func, args, kwargs or {})


class WatchedLogits(_Watched, Tensor):
    """Watched logits with values."""


class WatchedFakeLogits(_Watched, FakeTensor):
    """Watched logits without values, as in a predicted step."""


def watch_logits(output: Tensor, hidden: Tensor, total: HeadEvidence) -> Tensor:
    """Return a linear layer's ``output`` as watched logits; the evidence is added when its gradient arrives."""
    if not output.requires_grad:
        return output
    evidence = HeadEvidence(ended=True)

    def loss_of(hidden: Tensor, targets: Tensor, *_: object, **__: object) -> Tensor:
        evidence.reached = True
        return torch.zeros_like(targets)

    # By then the step has finished using the output, including an accuracy computed after the loss.
    output.register_hook(lambda gradient: total.add(evidence))
    return _mark(output, DeferredLogits(hidden.detach(), output.shape[-1], output.dtype, loss_of), evidence)


def _is_watched(value: object) -> bool:
    return isinstance(value, WatchedLogits | WatchedFakeLogits) and "deferred" in vars(value)


def _deferred_of(value: object) -> Any:
    return value.deferred if _is_watched(value) else value


def _mark(result: object, deferred: object, evidence: HeadEvidence) -> Any:
    if isinstance(result, Tensor) and isinstance(deferred, DeferredLogits):
        marked: Any = result
        if isinstance(result, FakeTensor):
            marked.__class__ = WatchedFakeLogits  # a tensor can be given one Python object, which it has
        else:
            with torch._C.DisableTorchFunctionSubclass():
                marked = result.as_subclass(WatchedLogits)
        marked.deferred, marked.evidence = deferred, evidence
        return marked
    if isinstance(result, tuple) and isinstance(deferred, tuple) and len(result) == len(deferred):
        return tuple(_mark(one, other, evidence) for one, other in zip(result, deferred, strict=True))
    return result


def _do_likewise(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
    """Call ``func`` on deferred logits, whose methods have the names of torch's."""
    if isinstance(args[0], DeferredLogits):
        if isinstance(func, MethodWrapperType):  # the getter of a property's descriptor
            return getattr(args[0], func.__self__.__name__)  # type: ignore[attr-defined]
        if getattr(Tensor, func.__name__, None) is func:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    return func(*args, **kwargs)


def _refused_in(error: Exception, func: Callable[..., Any]) -> str:
    refused, found, _ = str(error).partition(" of deferred logits")
    return refused if found else func.__name__
