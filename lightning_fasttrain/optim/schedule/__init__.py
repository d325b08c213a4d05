"""Learning rate schedules: their shapes, their lengths in steps, samples or tokens, and plots of them.

From the bottom up: ``rate_plan``, ``rate_request``, ``picture``, ``build_schedule``.
"""
