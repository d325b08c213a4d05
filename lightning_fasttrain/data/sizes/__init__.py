"""How much a step holds, and how much of it there is in a run.

From the bottom up: ``lengths``, ``run_length``, ``seen``.
"""
