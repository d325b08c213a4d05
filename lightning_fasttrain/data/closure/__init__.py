"""Integration of micro-batches and accumulation windows into Lightning's automatic optimization.

From the bottom up: ``roles``, ``scale_gradients``, ``split_search``, ``micro_batch_closure``.
"""
