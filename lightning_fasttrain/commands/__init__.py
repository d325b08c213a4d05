"""Subcommands of ``fasttrain`` in files of their own. Importing them imports nothing heavy.

From the bottom up: ``target``, ``rehearsed_script``, ``run_script``, ``rehearse_kills``, ``killed_script``, ``plan``,
``rehearse``, ``schedule``, ``verify``, ``why_not``.
"""
