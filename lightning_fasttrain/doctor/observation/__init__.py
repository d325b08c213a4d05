"""See what a training loop does, without changing it: times of phases and lines, operators, updates, modules.

From the bottom up: ``source_lines``, ``operator_costs``, ``operator_watch``, ``operator_trials``, ``step_records``,
``watch``, ``watched_calls``.
"""
