"""Optimizers by name, and the size of their state.

From the bottom up: ``decay_groups``, ``lion``, ``muon``, ``low_precision_updates``, ``host_optimizer``,
``plain_state``, ``state_bytes``, ``_known``, ``build_optimizer``, ``schedule_free_evaluation``.
"""
