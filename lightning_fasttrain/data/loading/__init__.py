"""Looks after what comes from the loader: bad samples, and ranks that have fewer batches than others.

From the bottom up: ``_wrapped_loader``, ``even_epochs``, ``_tolerant_dataset``, ``sample_guard``.
"""
