"""A model's parts: its blocks and heads, forwards that are wrapped, dropout that is switched off.

From the bottom up: ``select``, ``first_derivatives``, ``wrapped_forward``, ``split_vocabulary``, ``key_value_cache``,
``layer_kinds``, ``blocks``, ``recomputation``, ``recomputed_forward``, ``without_dropout``, ``parameters``, ``heads``.
"""
