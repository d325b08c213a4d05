"""Tensors in, scalar out."""

from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.loss.fused_loss_head import FusedLossHead, fuse_loss_head_
from lightning_fasttrain.loss.linear_cross_entropy import linear_cross_entropy
