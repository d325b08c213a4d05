"""See what a training loop does, without changing it: times of phases and lines, operators, updates, modules.

From the bottom up: ``source_lines``, ``line_times``, ``block_times``, ``module_watch``, ``operator_watch``,
``operator_changes``, ``operator_trials``, ``update_record``, ``measured``, ``watch``, ``torch_seams``,
``trainer_seams``.
"""
