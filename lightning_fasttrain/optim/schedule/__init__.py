"""Learning rate schedules: their shapes, their lengths in steps, samples or tokens, and plots of them.

From the bottom up: ``schedule_shapes``, ``build_schedule``.
"""
