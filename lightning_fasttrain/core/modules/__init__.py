"""A model's parts: its blocks and heads, forwards that are wrapped, dropout that is switched off.

From the bottom up: ``fake_mode``, ``select``, ``wrapped_forward``, ``blocks``, ``forward_attributes``,
``recomputation``, ``parameters``, ``heads``.
"""
