"""Runs a step on a few samples, unsplit and in micro-batches, without side effects.

From the bottom up: ``deterministic_step``, ``sample_rows``, ``runs``, ``try_split``.
"""
