"""Save and restore what a training step changes besides weights.

From the bottom up: ``rng``, ``surroundings``, ``metric_state``, ``values``, ``step_state``.
"""
