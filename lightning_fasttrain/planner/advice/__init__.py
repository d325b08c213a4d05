"""Explain which techniques act on a model, and which others could.

From the bottom up: ``training_setup``, ``explain``, ``why_not``.
"""
