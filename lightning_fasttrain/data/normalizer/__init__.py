"""Normalizers: what the loss of a batch is divided by, read from its graph and checked on a few samples.

From the bottom up: ``micro_batch_weights``, ``count_targets``, ``summed_values``, ``read_normalizers``, ``log_rules``,
``split_rule``, ``trial``, ``classify_terms``, ``try_log_rules``, ``find_split``, ``find_count``, ``step_weights``.
"""
