"""Keeps training steady: steps that would spoil the weights are not made.

From the bottom up: ``_step_gate``, ``_first_unfinite``, ``_schedules``, ``_running_limit``,
``_last_checkpoint``, ``finite_guard``, ``spike_guard``.
"""
