"""Find the padding of a batch, check on the model that it can be cut off, and cut it off, or run blocks without it.

From the bottom up: ``check_documents``, ``document_attention``, ``padded_axes``, ``pack``, ``find_padding``,
``padding_free``, ``trim_batch``, ``try_trimming``, ``trim_search``.
"""
