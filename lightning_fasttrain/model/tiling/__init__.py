"""Modules whose tokens are independent run on one tile of tokens after the other.

From the bottom up: ``own_parameters``, ``token_trial``, ``tiled_forward``, ``tiled_mlp``.
"""
