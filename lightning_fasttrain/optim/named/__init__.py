"""Optimizers by name, and the size of their state.

From the bottom up: ``host_optimizer``, ``low_precision_updates``, ``lion``, ``muon``, ``schedule_free_evaluation``,
``optimizer_state``, ``build_optimizer``.
"""
