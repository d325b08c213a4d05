"""List the combinations of techniques that a model could train with, and predict what they take.

From the bottom up: ``configuration``, ``predicted_memory``, ``search_space``.
"""
