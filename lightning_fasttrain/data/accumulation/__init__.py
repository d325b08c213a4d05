"""Optimizer steps of several batches in which every target has the same weight.

From the bottom up: ``token_weighted_accumulation``, ``global_batch``.
"""
