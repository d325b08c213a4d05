"""Continue a pass over the data where it was left: random states, positions, and datasets that keep their own.

From the bottom up: ``loader_rng``, ``seeded_passes``, ``dataset_state``, ``resumable_loader``.
"""
