"""Saves a run from crashes, signals and ranks that hang.

Checkpoints are whole or not there.

From the bottom up: ``_checkpoint_room``, ``_rank_board``, ``preemption_flag``, ``atomic_checkpoints``,
``preemption``, ``progress_watch``, ``hang_watch``.
"""
