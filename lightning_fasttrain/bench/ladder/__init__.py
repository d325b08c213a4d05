"""Measure each technique on top of those that helped, in turn with them, each in a process of its own.

It ends in a table, a picture, and code to paste.

From the bottom up: ``results``, ``recorder``, ``verdict``, ``worker``, ``report``, ``rungs``, ``process``,
``turns``, ``preflight``, ``run_ladder``.
"""
