"""Techniques that change the model's architecture: what it computes in training, or which parameters it has.

From the bottom up: ``auxiliary_loss``, ``chosen_blocks``, ``expert_layers``, ``find_bias_before_norm``, ``find_mlps``,
``residual_form``, ``token_arguments``, ``drop_bias_before_norm``, ``mixture_of_depths``, ``stochastic_depth``,
``upcycling``.
"""

from lightning_fasttrain.architecture.auxiliary_loss import add_auxiliary_gradient, auxiliary_loss
from lightning_fasttrain.architecture.drop_bias_before_norm import DropBiasBeforeNorm, drop_bias_before_norm_
from lightning_fasttrain.architecture.mixture_of_depths import MixtureOfDepths, mixture_of_depths_
from lightning_fasttrain.architecture.stochastic_depth import StochasticDepth, stochastic_depth_
from lightning_fasttrain.architecture.upcycling import Upcycling, load_dense_, upcycle_

__all__ = [
    "DropBiasBeforeNorm",
    "MixtureOfDepths",
    "StochasticDepth",
    "Upcycling",
    "add_auxiliary_gradient",
    "auxiliary_loss",
    "drop_bias_before_norm_",
    "load_dense_",
    "mixture_of_depths_",
    "stochastic_depth_",
    "upcycle_",
]
