"""Save and restore what a training step changes besides weights.

From the bottom up: ``metrics``, ``rng``, ``seeded_samples``, ``restore``.
"""
