"""Looks after what comes from the loader: its way to the device, bad samples, ranks with fewer batches than others.

From the bottom up: ``device_prefetch``, ``_skipping_dataset``, ``loader_wrapper``, ``even_epochs``, ``sample_guard``.
"""
