"""A model's parts: its blocks and heads, forwards that are wrapped, dropout that is switched off.

From the bottom up: ``blocks``, ``first_derivatives``, ``wrapped_forward``, ``named_module``, ``parameters``, ``heads``,
``recomputed_forward``, ``without_dropout``.
"""
