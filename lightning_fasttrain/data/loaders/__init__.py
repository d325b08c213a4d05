"""Wrappers of data loaders: device prefetch, bad samples, and ranks with unequal numbers of batches.

From the bottom up: ``device_prefetch``, ``even_epochs``, ``sample_guard``.
"""
