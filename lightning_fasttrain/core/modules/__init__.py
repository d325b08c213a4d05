"""A model's parts: its blocks and heads, forwards that are wrapped, dropout that is switched off.

From the bottom up: ``select``, ``first_derivatives``, ``layer_kinds``, ``wrapped_forward``, ``parameters``, ``blocks``,
``recomputed_forward``, ``without_dropout``, ``heads``.
"""
