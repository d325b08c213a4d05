"""Subcommands of ``fasttrain`` in files of their own. Importing them imports nothing heavy.

From the bottom up: ``target``, ``rehearsed_script``, ``run_script``, ``rehearse_kills``, ``killed_script``, ``memory``,
``plan``, ``rehearse``, ``schedule``, ``shard``, ``verify``, ``why_not``.
"""
