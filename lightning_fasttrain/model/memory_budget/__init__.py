"""Chooses which blocks to recompute so that a step keeps within a limit.

It measures, solves and checks in the first steps of the training itself.

From the bottom up: ``block_cost``, ``knapsack``, ``checkpoint_plan``, ``rank_agreement``, ``block_profiler``,
``memory_budget``.
"""
