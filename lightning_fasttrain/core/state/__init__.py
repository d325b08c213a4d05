"""Save and restore what a training step changes besides weights.

From the bottom up: ``rng``, ``restore``, ``step_state``, ``select_entries``.
"""
