"""Outputs of a frozen part of a model, computed once for each sample.

From the bottom up: ``cached_forward``, ``frozen_cache``.
"""
