"""Says what acts on a model, and what could.

From the bottom up: ``setting``, ``explain``, ``unused``, ``why_not``.
"""
