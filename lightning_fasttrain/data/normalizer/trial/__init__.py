"""Runs a step on a few samples, unsplit and in micro-batches, without side effects.

From the bottom up: ``deterministic_step``, ``looks``, ``sample_rows``, ``runs``, ``step_function``, ``try_split``.
"""
