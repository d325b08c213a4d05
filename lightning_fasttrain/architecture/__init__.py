"""Techniques that change the model's architecture: what it computes in training, or which parameters it has.

From the bottom up: ``auxiliary_loss``, ``expert_layers``, ``drop_bias_before_norm``, ``residual_blocks``,
``init_residual``, ``mixture_of_depths``, ``stochastic_depth``, ``upcycling``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.architecture.auxiliary_loss import add_auxiliary_gradient, auxiliary_loss
    from lightning_fasttrain.architecture.drop_bias_before_norm import DropBiasBeforeNorm, drop_bias_before_norm_
    from lightning_fasttrain.architecture.init_residual import init_residual_
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
    "init_residual_",
    "load_dense_",
    "mixture_of_depths_",
    "stochastic_depth_",
    "upcycle_",
]
