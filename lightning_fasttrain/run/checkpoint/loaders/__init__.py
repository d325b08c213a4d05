"""Continue a pass over the data where it was left: random states, positions, and datasets that keep their own.

From the bottom up: ``dataset_state``, ``resumable_loader``.
"""
