"""The ``fasttrain`` command: ``main`` has a row for each subcommand. Importing it imports nothing heavy.

From the bottom up: ``technique_cards``, ``subject``, ``doctor``, ``command``, ``rehearsal``, ``tool_commands``,
``model_commands``, ``examined_script``, ``examine_script``, ``tuning``, ``main``.
"""
