"""Find the positions that a mean loss averages over, from the inputs of a step and its model."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fasttrain.core.batch import LABELS, find_labels, is_integer
from lightning_fasttrain.core.messages import note_once

IGNORED = -100


def masks_in(batch: Any, arguments: Mapping[str, Any], model: nn.Module) -> Iterator[Tensor]:
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
        mask = given.get(name) if isinstance(given, Mapping) else None
        if isinstance(mask, Tensor):
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
    return next((mask for mask in masks if mask.ndim < len(shape) and mask.shape == shape[: mask.ndim]), None)
