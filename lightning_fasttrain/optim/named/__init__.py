"""Makes optimizers by their names, and says what they keep.

From the bottom up: ``decay_groups``, ``lion``, ``muon``, ``low_precision_updates``, ``host_optimizer``,
``plain_state``, ``state_bytes``, ``_known``, ``build_optimizer``, ``schedule_free_evaluation``.
"""
