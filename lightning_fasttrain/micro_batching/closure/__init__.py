"""Integration of micro-batches and accumulation windows into Lightning's automatic optimization.

From the bottom up: ``micro_batch_logging``, ``micro_batch_closure``.
"""
