"""The learning rate over a run: its shape, in the numbers of the run, step by step, and as a picture.

From the bottom up: ``rate_plan``, ``rate_request``, ``picture``, ``build_schedule``.
"""
