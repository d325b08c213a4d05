"""Find the blocks that a technique changes, and layers in them.

From the bottom up: ``chosen_blocks``, ``find_bias_before_norm``, ``find_mlps``, ``find_projections``.
"""
