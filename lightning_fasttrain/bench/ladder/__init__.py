"""Measures each technique on top of those that helped, a process for each.

It ends in a table, a picture, and code to paste.

From the bottom up: ``rows``, ``judge``, ``recorder``, ``report``, ``rungs``, ``hosts``, ``live``, ``paste``,
``preparation``, ``worker``, ``process``, ``climb``.
"""
