"""Measures each technique on top of those that helped, a process for each.

It ends in a table, a picture, and code to paste.

From the bottom up: ``results``, ``recorder``, ``as_code``, ``verdict``, ``training_loops``, ``report``, ``rungs``,
``worker``, ``progress``, ``preflight``, ``process``, ``run_ladder``.
"""
