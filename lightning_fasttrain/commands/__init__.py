"""Subcommands of ``fasttrain`` in files of their own. Importing them imports nothing heavy.

From the bottom up: ``target``, ``rehearsed_script``, ``plan``, ``rehearse``, ``verify``, ``why_not``.
"""
