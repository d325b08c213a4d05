"""Guard a run against non-finite values, loss spikes, ranks that hang, and preemption.

From the bottom up: ``step_guard``, ``spike_guard``, ``preemption``, ``watchdog``, ``finite_guard``, ``hang_watch``.
"""
