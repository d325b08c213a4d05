"""Guard a run against non-finite values, loss spikes, ranks that hang, and preemption.

From the bottom up: ``_last_checkpoint``, ``skip_step``, ``preemption_flag``, ``rank_heartbeats``, ``rolling_quantile``,
``locate_nan``, ``preemption``, ``watchdog``, ``spike_guard``, ``finite_guard``, ``hang_watch``.
"""
