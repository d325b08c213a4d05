"""Choose which blocks to recompute so that a step stays within a memory limit.

The first steps of the training are measured, the choice is solved exactly, and its peak is checked.

From the bottom up: ``block_cost``, ``checkpoint_plan``, ``block_profiler``, ``memory_budget``.
"""
