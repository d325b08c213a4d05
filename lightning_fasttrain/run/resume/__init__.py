"""Lets a killed run go on, bit for bit.

Each file knows one kind of state that Lightning keeps in no checkpoint.

From the bottom up: ``_gathered_states``, ``_loop_progress``, ``_running_metrics``, ``extra_state``, ``loader_rng``,
``resumable_loader``, ``run_fingerprint``, ``exact_resume``.
"""
