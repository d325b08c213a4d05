"""Run a step of a user's model with and without techniques, and check that training is the same.

Differences are measured against the rounding noise of the plain step on that model.

From the bottom up: ``digest``, ``short_run``, ``record_steps``, ``first_difference``, ``compare_records``, ``report``,
``verify``.
"""
