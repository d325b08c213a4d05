"""What a training step changes besides weights, taken and restored.

From the bottom up: ``metrics``, ``rng``, ``restore``.
"""
