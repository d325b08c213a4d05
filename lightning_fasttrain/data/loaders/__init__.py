"""Wrappers of data loaders: device prefetch, bad samples, and ranks with unequal numbers of batches.

From the bottom up: ``fetch_ahead``, ``sample_guard``, ``device_prefetch``, ``even_epochs``.
"""
