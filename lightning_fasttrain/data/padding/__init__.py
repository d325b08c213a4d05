"""Find the padding of a batch, check on the model that it can be cut off, and cut it off in micro-batches.

From the bottom up: ``check_documents``, ``padded_axes``, ``pack``, ``find_padding``, ``trim_batch``, ``try_trimming``,
``trim_search``.
"""
