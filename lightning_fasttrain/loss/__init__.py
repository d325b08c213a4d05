"""Loss functions and techniques that compute the logits of a few tokens at a time.

``min_snr_weights`` weights the loss of a diffusion model instead.

From the bottom up: ``chunked``, ``deferred_logits``, ``logit_losses``, ``linear_cross_entropy``,
``linear_kl_divergence``, ``loss_inputs``, ``fused_loss_head``, ``teacher``, ``distillation``, ``min_snr_weights``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.loss.deferred_logits import DeferredLogits
    from lightning_fasttrain.loss.distillation import Distillation, distil_into
    from lightning_fasttrain.loss.fused_loss_head import FusedLossHead, fuse_loss_head_
    from lightning_fasttrain.loss.linear_cross_entropy import linear_cross_entropy
    from lightning_fasttrain.loss.linear_kl_divergence import kl_divergence, linear_kl_divergence
    from lightning_fasttrain.loss.min_snr_weights import min_snr_weights

__all__ = [
    "DeferredLogits",
    "Distillation",
    "FusedLossHead",
    "distil_into",
    "fuse_loss_head_",
    "kl_divergence",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "min_snr_weights",
]
