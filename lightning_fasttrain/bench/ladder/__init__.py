"""Measure each technique on top of those that helped, in turn with them, each in a process of its own.

It ends with three stacks in turn with strong baselines: tables, a picture, and code to paste.

From the bottom up: ``results``, ``worker``, ``report``, ``picture``, ``rungs``, ``turns``, ``preflight``,
``run_ladder``.
"""
