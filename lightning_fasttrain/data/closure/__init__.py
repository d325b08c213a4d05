"""Integration of micro-batches and accumulation windows into Lightning's automatic optimization.

From the bottom up: ``roles``, ``micro_batch_logging``, ``split_search``, ``micro_batch_closure``.
"""
