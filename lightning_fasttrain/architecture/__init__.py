"""Techniques that change the model's architecture: what it computes in training, or which parameters it has.

From the bottom up: ``auxiliary_loss``, ``chosen_blocks``, ``residual_form``, ``token_arguments``, ``mixture_of_depths``,
``stochastic_depth``.
"""

from lightning_fasttrain.architecture.auxiliary_loss import add_auxiliary_gradient, auxiliary_loss
from lightning_fasttrain.architecture.mixture_of_depths import MixtureOfDepths, mixture_of_depths_
from lightning_fasttrain.architecture.stochastic_depth import StochasticDepth, stochastic_depth_

__all__ = [
    "MixtureOfDepths",
    "StochasticDepth",
    "add_auxiliary_gradient",
    "auxiliary_loss",
    "mixture_of_depths_",
    "stochastic_depth_",
]
