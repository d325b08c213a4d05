"""Techniques that change the model's architecture: what it computes in training, or which parameters it has.

From the bottom up: ``chosen_blocks``, ``residual_form``, ``stochastic_depth``.
"""

from lightning_fasttrain.architecture.stochastic_depth import StochasticDepth, stochastic_depth_

__all__ = ["StochasticDepth", "stochastic_depth_"]
