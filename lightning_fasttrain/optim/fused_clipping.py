"""Gradient clipping with a fused optimizer under bfloat16 autocast, which Lightning 2.6.6 refuses."""

from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import Facts


@check_arguments
def allow_fused_clipping_(precision: Precision) -> Undo | None:
    """Let ``precision`` clip gradients of optimizers made with ``fused=True``, where no loss scaler is in use.

    ``MixedPrecision`` refuses because a fused optimizer unscales gradients inside its step, so clipping before it would
    see scaled gradients. That holds for float16 alone: bfloat16 uses no scaler, so gradients are not scaled.

    Args:
        precision: a trainer's ``precision_plugin``; only ``bf16-mixed`` is changed.

    Returns:
        A function that undoes it; None if there was nothing to change.

    Example:
        >>> from lightning.pytorch.plugins.precision import MixedPrecision
        >>> undo = allow_fused_clipping_(MixedPrecision("bf16-mixed", "cpu"))

    Source:
        Lightning issue 21435.
    """
    if not isinstance(precision, MixedPrecision) or precision.scaler is not None:
        return None

    def clip_gradients(*args: Any, **kwargs: Any) -> None:
        # The method of the base class clips without this check.
        Precision.clip_gradients(precision, *args, **kwargs)

    return patch(precision, "clip_gradients", clip_gradients)


class FusedClipping(Technique):
    """Make ``gradient_clip_val`` work with ``AdamW(fused=True)`` under ``precision="bf16-mixed"``.

    Acts on this trainer's precision plugin, for the duration of the run. Fabric and bare loops do not need it, since
    their clipping does not refuse.

    Example:
        >>> clipping = FusedClipping()

    Source:
        See :func:`~lightning_fasttrain.optim.allow_fused_clipping_`.
    """

    effect: ClassVar[str] = "gradient clipping with a fused optimizer in bf16"
    when: ClassVar[str] = "you clip in mixed precision with a fused optimizer, which Lightning refuses"
    in_a_loop: ClassVar[str] = "nothing: fabric.clip_gradients and torch.nn.utils.clip_grad_norm_ work as they are"
    predicted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.precision not in (None, "bf16-mixed"):
            return f"Lightning refuses fused clipping only in bf16-mixed; the precision is {facts.precision}"
        return "the Trainer does not clip gradients" if facts.clips == "no" else None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        undo = allow_fused_clipping_(trainer.precision_plugin)
        if undo is None:
            note_once(f"FusedClipping: precision {trainer.precision} needs no change, or does not allow it (float16)")
        return undo
