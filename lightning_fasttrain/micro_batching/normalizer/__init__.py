"""Normalizers: what the loss of a batch is divided by, read from its graph and checked on a few samples.

From the bottom up: ``count_targets``, ``split_rule``, ``find_split``, ``step_weights``.
"""
