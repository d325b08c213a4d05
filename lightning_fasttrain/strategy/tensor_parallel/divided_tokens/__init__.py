"""Shares of the tokens of every sequence on the ranks of a group, with split layers (sequence parallelism) or without.

From the bottom up: ``hidden_states``, ``sequence``, ``exchange_heads``, ``context_parallel``.
"""
