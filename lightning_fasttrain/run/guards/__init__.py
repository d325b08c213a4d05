"""Guard a run against non-finite values, loss spikes, ranks that hang, and preemption.

From the bottom up: ``judged_steps``, ``step_guard``, ``preemption_flag``, ``rank_heartbeats``, ``locate_nan``,
``running_limit``, ``spike_guard``, ``preemption``, ``watchdog``, ``finite_guard``, ``hang_watch``.
"""
