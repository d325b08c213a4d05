"""Modules whose tokens are independent run on one tile of tokens after the other.

From the bottom up: ``tiled_forward``, ``tiled_mlp``.
"""
