"""What the loss of a batch is divided by: read from its graph, and checked on a few samples without a trace.

From the bottom up: ``step_function``, ``restore_state``, ``deterministic_step``, ``read_normalizers``,
``micro_batch_weights``, ``step_gradients``, ``count_targets``, ``log_rules``, ``split_rule``, ``sample_rows``,
``trial``, ``find_split``.
"""
