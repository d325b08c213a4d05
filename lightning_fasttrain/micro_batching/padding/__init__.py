"""Check on the model that the padding of a batch can be cut off, and cut it off, or run blocks without it.

From the bottom up: ``pack``, ``packed_forward``, ``try_trimming``, ``padding_free``, ``trim_search``.
"""
