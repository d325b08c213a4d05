"""Save and restore what a training step changes besides weights.

From the bottom up: ``by_parameter``, ``metrics``, ``rng``, ``seeded_samples``, ``restore``, ``select_entries``,
``surroundings``.
"""
