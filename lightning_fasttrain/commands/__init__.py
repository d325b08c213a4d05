"""Subcommands of ``fasttrain`` in files of their own. Importing them imports nothing heavy.

From the bottom up: ``target``, ``plan``, ``verify``, ``why_not``.
"""
