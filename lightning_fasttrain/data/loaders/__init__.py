"""Wrappers of data loaders: device prefetch, bad samples, global batches, and ranks with unequal numbers of batches.

From the bottom up: ``global_batches``, ``sample_guard``, ``device_prefetch``, ``even_epochs``.
"""
