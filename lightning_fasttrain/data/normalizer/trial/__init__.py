"""Runs a step on a few samples, unsplit and in pieces, and leaves no trace.

From the bottom up: ``step_function``, ``deterministic_step``, ``sample_rows``, ``runs``, ``try_split``.
"""
