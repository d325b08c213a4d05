"""Normalizers: what the loss of a batch is divided by, read from its graph and checked on a few samples.

From the bottom up: ``read_normalizers``, ``micro_batch_weights``, ``step_gradients``, ``count_targets``,
``log_rules``, ``split_rule``, ``trial``, ``classify_terms``, ``match_rules``, ``find_split``,
``find_count``.
"""
