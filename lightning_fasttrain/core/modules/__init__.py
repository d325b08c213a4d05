"""A model's parts: its blocks and heads, forwards that are wrapped, dropout that is switched off.

From the bottom up: ``blocks``, ``find_module``, ``first_derivatives``, ``wrapped_forward``, ``parameters``, ``heads``,
``recomputed_forward``, ``without_dropout``.
"""
