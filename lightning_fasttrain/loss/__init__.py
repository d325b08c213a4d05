"""Tensors in, scalar out."""

from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.loss.distillation import Distillation, distilling
from lightning_fasttrain.loss.fused_loss_head import FusedLossHead, fuse_loss_head_
from lightning_fasttrain.loss.linear_cross_entropy import linear_cross_entropy
from lightning_fasttrain.loss.linear_kl_divergence import kl_divergence, linear_kl_divergence
