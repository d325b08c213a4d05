"""Saves a run from crashes, signals and ranks that hang.

Checkpoints are whole or not there.

From the bottom up: ``preemption_flag``, ``preemption``, ``checkpoint_disk_space``, ``atomic_checkpoints``,
``rank_heartbeats``, ``watchdog``, ``hang_watch``.
"""
