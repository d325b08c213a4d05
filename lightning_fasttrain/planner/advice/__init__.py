"""Explain which techniques act on a model, and which others could.

From the bottom up: ``why_not``, ``explain``.
"""
