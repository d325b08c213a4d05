"""Find where a model has its head, and which positions of a batch count in its loss."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fasttrain.core.batch import LABELS, find_labels, is_integer
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.blocks import has_parameters, keep_outermost
from lightning_fasttrain.core.modules.heads import SplitHead
from lightning_fasttrain.core.modules.select import find_module
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, output_embeddings_of, wrapper_on
from lightning_fasttrain.loss.deferred_logits import DeferredLogits, add_bias, scale_bias
from lightning_fasttrain.loss.linear_kl_divergence import LogitsOf

IGNORED = -100
HEAD = "the head"  # key of its records, which no qualified name can be


def masks_in(batch: object, arguments: Mapping[str, Any], model: nn.Module) -> Iterator[Tensor]:
    """Yield masks of the counted positions, as booleans, the most reliable first.

    Args:
        batch: the input of the step.
        arguments: the inputs of ``model``, by name.
        model: the model that computed the logits.
    """
    # Hugging Face's models are recognized by `can_generate`; others may have a `config` with another meaning.
    config = getattr(model, "config", None) if hasattr(type(model), "can_generate") else None
    # Encoder-decoder models shift the decoder's inputs and leave labels unshifted.
    one_sided = config is not None and not getattr(config, "is_encoder_decoder", False)
    # Their loss uses these unchanged, and then ignores `labels`.
    if is_integer(shifted := arguments.get("shift_labels")):
        yield shifted != IGNORED
    for name in LABELS:
        labels: Any = arguments.get(name)
        if is_integer(labels):
            # Hugging Face's causal models predict the next label at each position, and none at the last.
            if one_sided and type(model).can_generate():  # type: ignore[attr-defined]
                labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
            yield labels != IGNORED
    if (labels := find_labels(batch)[1]) is not None:
        yield labels != IGNORED
    name = "attention_mask" if config is None or one_sided else "decoder_attention_mask"
    for given in (arguments, batch):
        if isinstance(given, Mapping) and isinstance(mask := given.get(name), Tensor):
            yield mask != 0


def of_logits(masks: Iterable[Tensor], shape: torch.Size) -> tuple[Tensor | None, bool]:
    """Return the first of the ``masks`` that fits logits of this shape, and whether their classes are the second axis.

    Classes are the last axis, (..., V), unless the mask shows that logits are (B, V, ...), as in ``cross_entropy``.
    """
    for mask in masks:
        if mask.shape == shape[:-1]:
            return mask, False
        if mask.shape == (*shape[:1], *shape[2:]):
            return mask, True
        note_once(f"distillation: labels or mask {tuple(mask.shape)} do not fit logits {tuple(shape)}")
    return None, False


def of_feature(masks: Iterable[Tensor], shape: torch.Size) -> Tensor | None:
    """Return the first of the ``masks`` whose axes are the leading ones of this shape."""
    for mask in masks:
        if mask.ndim < len(shape) and mask.shape == shape[: mask.ndim]:
            return mask
    return None


PROJECTIONS = "distillation_projections"


class Seen:
    """Records of one forward: module's name → (first input, output)."""

    def __init__(self) -> None:
        self.open = False
        self.at: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        self.open, self.at = True, {}
        try:
            yield
        finally:
            self.open = False

    @contextmanager
    def hook(self, module: nn.Module | None, name: str) -> Iterator[None]:
        """Record a module in the context, outside of whatever replaces its forward now or later."""
        if module is None:
            yield
            return

        def note(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
            # A call with `then` is that of a fused head that computes its loss.
            if "then" not in kwargs:
                self.at[name] = (next(iter(args), None), output)

        with module.register_forward_hook(note, with_kwargs=True):
            yield

    def clear(self) -> None:
        self.at = {}

    def __getstate__(self) -> dict[str, Any]:  # copies do not keep activations
        return {"open": False, "at": {}}


class Tap(WrappedForward):
    """Records a module's input and output while requested; of several calls, the last."""

    def __init__(self, module: nn.Module, name: str, seen: Seen) -> None:
        super().__init__(module)
        self.name, self.seen = name, seen

    def __call__(self, *args: object, **kwargs: object) -> Any:
        output = self.inner(*args, **kwargs)
        if self.seen.open:
            self.seen.at[self.name] = (next(iter(args), None), output)
        return output


def student_of(model: nn.Module, name: str | None) -> nn.Module:
    """Return the module of ``model`` whose output is compared with the teacher's."""
    if name is not None:
        return find_module(model, name, "student")
    named = keep_outermost({key: m for key, m in model.named_modules() if hasattr(type(m), "get_output_embeddings")})
    if len(named) > 1:
        what = f"{type(model).__name__} holds several models: {', '.join(map(repr, named))}"
        raise ValueError(explain(what, "only one of them can be compared with the teacher", "Name it: student='...'"))
    if named:
        return next(iter(named.values()))
    if isinstance(model, L.LightningModule):
        children = [m for key, m in model.named_children() if key != PROJECTIONS and has_parameters(m)]
        # Containers have no forward for a step to call.
        if len(children) == 1 and type(children[0]) not in (nn.ModuleList, nn.ModuleDict):
            return children[0]
    return model


def head_of(model: nn.Module, name: str | None, argument: str) -> nn.Module | None:
    """Return the layer that computes the logits: by name, or as Hugging Face's models define it; None if unknown."""
    if name is not None:
        return find_module(model, name, argument)
    return next(iter(output_embeddings_of(model)), None)


def logits_in(output: object) -> Any:
    """Return the logits in a model's output: itself, its ``logits``, or a tuple's first tensor with axes; or None."""
    if isinstance(output, Mapping):
        return output.get("logits")
    if not isinstance(output, list | tuple | Tensor | DeferredLogits):
        return getattr(output, "logits", None)
    return next(filter(_has_axes, _as_parts(output)), None)


def _has_axes(value: object) -> bool:
    return isinstance(value, Tensor | DeferredLogits) and value.ndim > 0


def feature_in(output: object) -> Tensor | None:
    """Return the hidden states in a layer's output: itself, or the first tensor of a tuple or mapping."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for part in _as_parts(output):
        if isinstance(part, Tensor):
            return part
    return None


def _as_parts(output: object) -> Sequence[Any]:
    if isinstance(output, list | tuple):
        return output
    return (output,)


def _is_written(values: object) -> bool:
    """Whether the output of an operation was modified in place."""
    return isinstance(values, Tensor) and not values.is_inference() and values._version > 0


def logits_of(
    output: object, head: nn.Module | None, tapped: tuple[object, object] | None, autocast: torch.dtype | None
) -> LogitsOf | None:
    """Return the logits of a model's output, expressed by the inputs of its head where that is known to be equal.

    Args:
        output: the model's output. If it contains no logits, the head's output is used.
        head: the layer that computed them, if it is a plain linear one.
        tapped: first input and output of ``head``.
        autocast: the autocast dtype in which the model was run.
    """
    logits = logits_in(output)
    hidden, made = tapped or (None, None)
    if logits is None:
        logits = made
    factor, cap, added = 1.0, None, None
    if isinstance(logits, DeferredLogits) and logits.are_plain():
        logits = logits.compute()
    if isinstance(logits, DeferredLogits):
        # They are cap · tanh(factor · (W h + b) + added); LogitsOf are cap · tanh((W h + b) / cap).
        hidden, cap = logits.hidden, logits.cap
        factor, added = logits.scales()
    elif logits is not made or _is_written(logits):  # they were modified afterwards
        hidden = None
    if not isinstance(hidden, Tensor) or not isinstance(head, nn.Linear):  # deferred logits need its weight
        return LogitsOf(logits) if isinstance(logits, Tensor) else None
    if wrapper_on(head, SplitHead):
        why = "the vocabulary of the head is split over a tensor group, and distillation needs all logits of a token"
        raise ValueError(explain("Distillation beside FusedLossHead", why, "Leave FusedLossHead out"))
    bias: Tensor | None = head.bias
    if factor != 1:  # on D values per token instead of V
        hidden, bias = hidden * factor, scale_bias(bias, factor)
    if added is not None:
        bias = add_bias(bias, added.to(head.weight.dtype))
    return LogitsOf(hidden, head.weight, bias, cap, dtype=autocast)
