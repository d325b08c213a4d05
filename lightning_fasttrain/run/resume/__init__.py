"""Lets a killed run go on, bit for bit.

Each file knows one kind of state that Lightning keeps in no checkpoint.

From the bottom up: ``_gathered_states``, ``_loader_randomness``, ``_loop_progress``, ``_run_identity``,
``_uncheckpointed_state``, ``_running_metrics``, ``resumable_loader``, ``exact_resume``.
"""
