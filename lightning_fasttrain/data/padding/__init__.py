"""Check on the model that the padding of a batch can be cut off, and cut it off, or run blocks without it.

From the bottom up: ``check_documents``, ``document_attention``, ``pack``, ``packed_forward``, ``padding_free``,
``trim_batch``, ``try_trimming``, ``trim_search``.
"""
