"""Runs a step on a few samples, whole and in pieces, and leaves no trace.

So the rule is found by which the parts of a batch add up.

From the bottom up: ``_put_back``, ``_step_parts``, ``_trial_mode``, ``_split_trial``, ``find_count``.
"""
