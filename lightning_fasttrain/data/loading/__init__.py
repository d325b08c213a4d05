"""Looks after what comes from the loader: its way to the device, bad samples, ranks with fewer batches than others.

From the bottom up: ``device_prefetch``, ``_wrapped_loader``, ``even_epochs``, ``_tolerant_dataset``, ``sample_guard``.
"""
