"""The ``fasttrain`` command: ``main`` parses, one file for each subcommand. Importing them imports nothing heavy.

From the bottom up: ``doctor``, ``technique_table``, ``subject``, ``target``, ``memory``, ``plan``, ``rehearsal``,
``schedule``, ``shard``, ``why_not``, ``verify``, ``main``.
"""
