"""Continue a pass over the data where it was left: random states, positions, and what datasets and samplers hold.

From the bottom up: ``attributes``, ``dataset_state``, ``resumable_loader``.
"""
