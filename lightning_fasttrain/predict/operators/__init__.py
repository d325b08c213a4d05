"""What operations on fake tensors return.

From the bottom up: ``data_dependent_values``, ``operator_cache``.
"""
