"""Measure each technique on top of those that helped, in turn with them, each in a process of its own.

It ends in a table, a picture, and code to paste.

From the bottom up: ``results``, ``worker``, ``report``, ``rungs``, ``turns``, ``preflight``, ``run_ladder``.
"""
