"""Chooses which blocks to recompute so that a step keeps within a limit.

It measures, solves and checks in the first steps of the training itself.

From the bottom up: ``block_cost``, ``placement``, ``agreement``, ``checkpoint_plan``, ``step_watch``,
``memory_budget``.
"""
