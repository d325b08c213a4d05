"""Normalizers: what the loss of a batch is divided by, read from its graph and checked on a few samples.

From the bottom up: ``read_normalizers``, ``micro_batch_weights``, ``count_targets``, ``step_gradients``, ``log_rules``,
``split_rule``, ``trial``, ``step_weights``, ``classify_terms``, ``match_rules``, ``find_split``, ``find_count``.
"""
