"""Find the padding of a batch, check on the model that it can be cut off, and cut it off in micro-batches.

From the bottom up: ``padded_axes``, ``find_padding``, ``trim_batch``, ``try_trimming``, ``trim_search``.
"""
