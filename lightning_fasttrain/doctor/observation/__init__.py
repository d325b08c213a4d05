"""See what a training loop does, without changing it: times of phases and lines, operators, updates, modules.

From the bottom up: ``source_lines``, ``line_sampler``, ``operator_watch``, ``operator_trials``, ``update_record``,
``module_watch``, ``measured``, ``watch``, ``torch_seams``, ``trainer_seams``.
"""
