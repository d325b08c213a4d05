"""Optimizers by name, and the size of their state.

From the bottom up: ``low_precision_updates``, ``decay_groups``, ``host_optimizer``, ``lion``, ``muon``,
``schedule_free_evaluation``, ``plain_state``, ``state_bytes``, ``build_optimizer``.
"""
