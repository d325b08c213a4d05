"""Logits with their values, which show whether deferred logits could stand in for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fasttrain.loss.deferred_logits import DeferredLogits

# Strategies and precision plugins ask this of every tensor in an output. Deferred logits, which are none, pass them by.
_ASKED_OF_TENSORS = {"requires_grad", "grad_fn", "is_leaf", "register_hook", "is_floating_point", "is_nested", "layout"}


@dataclass
class HeadEvidence:
    """What the training steps so far have shown about one linear layer.

    Attributes:
        ended: whether a gradient came back to its output, wherever it came from.
        reached: whether the output went into a cross-entropy.
        refused: the first operation on the output that deferred logits cannot do; "" if there was none.
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


class WatchedLogits(Tensor):
    """A tensor of logits, beside which deferred logits go through everything that is done to it.

    The values are those of the plain tensor. Operations that deferred logits refuse are noted as evidence, and their
    results are plain tensors.
    """

    deferred: DeferredLogits
    evidence: HeadEvidence

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if torch.compiler.is_compiling():  # what is noted while tracing would not be noted when the code runs
            return result
        watched = [one for one in tree_leaves((args, kwargs)) if _is_watched(one)]
        if not watched or _name_of(func) in _ASKED_OF_TENSORS:
            return result
        try:
            deferred = _do_likewise(func, tree_map(_deferred_of, tuple(args)), tree_map(_deferred_of, kwargs))
        except Exception as error:  # whatever it is, training with deferred logits would raise it too
            for one in watched:
                one.evidence.refused = one.evidence.refused or _refused_in(error)
            return result
        return _mark(result, deferred, watched[0].evidence)


def watch_logits(output: Tensor, hidden: Tensor, total: HeadEvidence) -> Tensor:
    """Return a linear layer's ``output`` as watched logits; when its gradient arrives, what was seen is added up."""
    if not output.requires_grad:
        return output
    evidence = HeadEvidence(ended=True)

    def loss_of(hidden: Tensor, targets: Tensor, *_: Any, **__: Any) -> Tensor:
        evidence.reached = True
        return torch.zeros_like(targets)

    # By then the step has done all that it does with the output, such as computing an accuracy after the loss.
    output.register_hook(lambda gradient: total.add(evidence))
    return _mark(output, DeferredLogits(hidden.detach(), output.shape[-1], output.dtype, loss_of), evidence)


def _is_watched(value: Any) -> bool:
    return isinstance(value, WatchedLogits) and "deferred" in vars(value)


def _deferred_of(value: Any) -> Any:
    return value.deferred if _is_watched(value) else value


def _mark(result: Any, deferred: Any, evidence: HeadEvidence) -> Any:
    if isinstance(result, Tensor) and isinstance(deferred, DeferredLogits):
        with torch._C.DisableTorchFunctionSubclass():
            marked = result.as_subclass(WatchedLogits)
        marked.deferred, marked.evidence = deferred, evidence
        return marked
    if isinstance(result, tuple) and isinstance(deferred, tuple) and len(result) == len(deferred):
        return tuple(_mark(one, other, evidence) for one, other in zip(result, deferred, strict=True))
    return result


def _name_of(func: Any) -> str:
    # Of a property, torch hands over the getter of its descriptor.
    return func.__self__.__name__ if func.__name__ == "__get__" else func.__name__


def _do_likewise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` on deferred logits, which have torch's methods under their names alone."""
    if isinstance(args[0], DeferredLogits):
        if func.__name__ == "__get__":
            return getattr(args[0], _name_of(func))
        if getattr(Tensor, func.__name__, None) is func:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    return func(*args, **kwargs)


def _refused_in(error: Exception) -> str:
    refused, found, _ = str(error).partition(" of deferred logits")
    return refused if found else type(error).__name__
