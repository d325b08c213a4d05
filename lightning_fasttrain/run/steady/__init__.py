"""Keeps training steady: steps that would spoil the weights are not made.

From the bottom up: ``_schedules``, ``_last_checkpoint``, ``rolling_quantile``, ``skip_step``, ``spike_guard``,
``locate_nan``, ``finite_guard``.
"""
